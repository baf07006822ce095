"""The devices of a pod, from the kubelet's records and the device plugin's."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from base.paths import Paths
from base.pod import Pod
from base.types import DeviceId
from deviceplugin import checkpoint, pod_devices
from deviceplugin.checkpoint import Allocation
from deviceplugin.devices_for_pods import assigned, others
from deviceplugin.kubelet import records
from deviceplugin.pod_devices import PodHoldings, Stale, Unknown
from tests.kubelet import Kubelet
from tests.unit.deviceplugin.holding import HCA, Holding
from tests.unit.host import servers

A, B, C = servers.DGX_HCAS[:3]
POD = Pod("ml", "worker-0", "uid-0")
OTHER = Pod("ml", "worker-1", "uid-1")


@pytest.fixture
def paths() -> Iterator[Paths]:
    with tempfile.TemporaryDirectory(prefix="pf-") as root:  # short, for the sockets' paths
        yield servers.dgx(Path(root))


@pytest.fixture
def holding(paths: Paths) -> Holding:
    return Holding(paths)


def hcas(paths: Paths, pod: Pod = POD) -> list[str]:
    return [hca.device.id for hca in pod_devices.given_to(paths, pod).hcas]


@pytest.mark.parametrize("known", [f"{A}-3", A])
def test_id_stands_for_its_hca(holding: Holding, known: str) -> None:
    holding.give(POD, {known: [A]})
    (hca,) = pod_devices.given_to(holding.paths, POD).hcas
    assert (hca.resource, hca.id, hca.device.id) == (HCA, known, A)
    assert str(hca) == f"{A} (mlx5_0, uverbs0 231:192) of rdma/hca"


def test_each_hca_counts_once_in_the_order_of_addresses(holding: Holding) -> None:
    holding.give(POD, {f"{C}-1": [C]}, container="first")
    holding.give(POD, {f"{B}-0": [B], f"{A}-2": [A], f"{A}-3": [A]}, container="second")
    holding.give(OTHER, {f"{servers.DGX_HCAS[5]}-0": [servers.DGX_HCAS[5]]})
    assert hcas(holding.paths) == [A, B, C]


def test_token_of_all_stands_for_every_hca(holding: Holding) -> None:
    holding.give(POD, {"0": servers.DGX_HCAS})
    assert hcas(holding.paths) == list(servers.DGX_HCAS)


def test_every_token_of_a_pod_stands_for_every_hca(holding: Holding) -> None:
    holding.give(POD, {"0": [A, B], "1": [A, B], f"{C}-2": [C]})
    given = pod_devices.given_to(holding.paths, POD)
    for token in ("0", "1"):
        assert [hca.device.id for hca in given.hcas_of(token)] == [A, B]
    assert [hca.device.id for hca in given.hcas_of(f"{C}-2")] == [C]
    assert given.hcas_of("2") == ()


def test_id_of_ours_that_is_not_written_down_yet_is_no_answer(holding: Holding) -> None:
    """After a damaged checkpoint was set aside, until the device plugin has asked the kubelet."""
    holding.give(POD, {A: [A]})
    checkpoint.write(holding.paths, [], {HCA: []})
    with pytest.raises(
        Unknown, match=f"pod {POD} holds {A} of rdma/hca, but .* does not list this"
    ):
        pod_devices.given_to(holding.paths, POD)
    holding.kubelets_checkpoint.unlink()
    with pytest.raises(Unknown, match="cannot tell which HCAs"):
        pod_devices.given_to(holding.paths, POD)
    holding.write()
    checkpoint.write(holding.paths, [], {"rdma/another": []})
    assert pod_devices.given_to(holding.paths, POD).ids == {A}


def test_id_of_which_nothing_tells_the_hca_is_no_answer(holding: Holding) -> None:
    """Another device plugin gave it: to try again does not help."""
    holding.give(POD, {"17": []})
    unknown = Allocation(
        resource=HCA,
        id=DeviceId("17"),
        devices=(),
        time="2026-11-21T19:12:56Z",
        boot_id="this boot",
    )
    checkpoint.write(holding.paths, [checkpoint.encode(unknown)], {HCA: []})
    with pytest.raises(Unknown, match=r"holds 17 of rdma/hca, .*: delete the pod") as caught:
        pod_devices.given_to(holding.paths, POD)
    assert "try again" not in str(caught.value)


def test_kubelet_is_not_asked_while_no_pod_holds_anything_and_nothing_depends_on_it(
    holding: Holding, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []

    def of_pod(*given: object) -> list[records.PodDevices]:
        asked.append(given)
        return []

    monkeypatch.setattr(records, "of_pod", of_pod)
    checkpoint.write(holding.paths, [], {HCA: []})
    assert pod_devices.given_to(holding.paths, POD, needed=False).hcas == ()
    assert asked == []
    pod_devices.given_to(holding.paths, POD)
    assert len(asked) == 1
    holding.give(OTHER, {A: [A]})
    pod_devices.given_to(holding.paths, POD, needed=False)
    assert len(asked) == 2


@pytest.mark.parametrize("with_init", [False, True])
def test_init_containers_devices_are_the_pods(holding: Holding, with_init: bool) -> None:
    """PodResources leaves them out on older kubelets; the checkpoint never does."""
    holding.give(POD, {f"{A}-0": [A]}, container="setup", init=True)
    holding.give(POD, {f"{B}-0": [B]}, container="main")
    kubelet = Kubelet(holding.paths.kubelet, init_containers_listed=with_init)
    with kubelet:
        kubelet.hold(holding.held, holding.pods)
        assert set(hcas(holding.paths)) == {A, B}
        assert hcas(holding.paths) == hcas(holding.paths)


def test_pod_is_known_by_its_name_alone(holding: Holding) -> None:
    """As CRI-O had it for long: no UID in CNI_ARGS."""
    holding.give(POD, {f"{B}-0": [B]})
    with Kubelet(holding.paths.kubelet) as kubelet:
        kubelet.hold(holding.held, holding.pods)
        assert hcas(holding.paths, Pod("ml", "worker-0")) == [B]
        assert hcas(holding.paths, Pod("other", "worker-0")) == []


def test_ids_of_other_device_plugins_are_told_and_stand_for_nothing(holding: Holding) -> None:
    holding.give(POD, {"GPU-1": []}, resource="nvidia.com/gpu")
    given = pod_devices.given_to(holding.paths, POD)
    assert (given.hcas, given.ids) == ((), frozenset(["GPU-1"]))
    assert given.shown() == "no HCA"


def test_unknown_pod_holds_nothing(holding: Holding) -> None:
    holding.give(POD, {A: [A]})
    assert pod_devices.given_to(holding.paths, OTHER).ids == frozenset()
    assert pod_devices.given_to(holding.paths, Pod("", "")).hcas == ()


def test_node_without_kubelet_and_allocations_gives_nothing(tmp_path: Path) -> None:
    nowhere = Paths(kubelet=tmp_path / "kubelet", state=tmp_path / "state")
    assert pod_devices.given_to(nowhere, POD).hcas == ()
    nowhere.device_plugins.mkdir(parents=True)
    with pytest.raises(Unknown, match="cannot tell which HCAs"):  # here is a kubelet, that is away
        pod_devices.given_to(nowhere, POD)


def test_kubelet_that_cannot_be_asked_is_no_answer(holding: Holding) -> None:
    holding.give(POD, {A: [A]})
    holding.kubelets_checkpoint.unlink()
    with pytest.raises(Unknown) as caught:
        pod_devices.given_to(holding.paths, POD)
    assert f"cannot tell which HCAs pod {POD} has: " in str(caught.value)
    assert str(holding.paths.pod_resources) in str(caught.value)
    assert str(holding.kubelets_checkpoint) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": 9}'])
def test_damaged_checkpoint_is_no_answer(holding: Holding, content: bytes) -> None:
    holding.paths.devices.mkdir(parents=True)
    holding.paths.checkpoint.write_bytes(content)
    for ask in (lambda: pod_devices.given_to(holding.paths, POD), lambda: held(holding.paths)):
        with pytest.raises(Unknown, match=str(holding.paths.checkpoint)):
            ask()


def held(paths: Paths) -> Mapping[str, str]:
    return others(paths, assigned(paths), PodHoldings(Pod("", ""))).held


def test_only_what_a_container_has_for_itself_is_taken_from_the_others(holding: Holding) -> None:
    assert held(holding.paths) == {}
    holding.give(POD, {"0": [A, B]}, resource="rdma/all")
    holding.give(OTHER, {f"{A}-0": [A], "1": [A]})
    assert held(holding.paths) == {}
    holding.give(OTHER, {C: [C]}, resource="rdma/whole")
    assert held(holding.paths) == {C: "rdma/whole"}


@pytest.mark.parametrize(
    ("device_id", "hca"),
    [
        ("0000:3b:00.0", "0000:3b:00.0"),
        ("3B:00.0", "0000:3b:00.0"),
        ("0000:3b:00.0-12", "0000:3b:00.0"),
        ("10000:e1:00.0-0", "10000:e1:00.0"),
        ("mlx5_core.sf.4", "mlx5_core.sf.4"),
        ("mlx5_core.sf.4-1", "mlx5_core.sf.4"),
        ("rxe0-3", "rxe0"),
        ("rxe-a-3", "rxe-a"),
        ("GPU-1a", "GPU-1a"),
        ("7", "7"),
    ],
)
def test_hca_of_a_device_id(device_id: str, hca: str) -> None:
    assert pod_devices.hca_of(device_id) == hca


@pytest.mark.parametrize("asked", [f"{A}-3", f"{A}-9", A, A.upper()])
def test_hca_is_found_by_any_of_its_ids(holding: Holding, asked: str) -> None:
    holding.give(POD, {f"{A}-3": [A]})
    hca = pod_devices.given_to(holding.paths, POD).hca(asked)
    assert hca is not None
    assert hca.device.id == A
    assert pod_devices.given_to(holding.paths, POD).hca(f"{B}-3") is None


def test_number_that_is_another_hcas_by_now_is_told(holding: Holding) -> None:
    """The worst case: the old node works, and is another HCA."""
    holding.give(POD, {A: [A]})
    (hca,) = pod_devices.given_to(holding.paths, POD).hcas
    verbs = holding.paths.sys / "class/infiniband_verbs"
    for name, other in (("uverbs0", "mlx5_1"), ("uverbs1", "mlx5_0")):
        (verbs / name / "ibdev").write_text(f"{other}\n")
    with pytest.raises(Stale, match="uverbs1 231:193 now"):
        pod_devices.require_current(holding.paths, hca, ["mlx5_0"])


def test_device_that_is_away_has_no_number_to_differ(holding: Holding) -> None:
    holding.give(POD, {A: [A]})
    (held,) = pod_devices.given_to(holding.paths, POD).hcas
    pod_devices.require_current(holding.paths, held, [])
    pod_devices.require_current(holding.paths, held, [f"mlx5_{os.getpid()}"])


def test_only_the_devices_that_matter_are_compared(tmp_path: Path) -> None:
    """Siblings that were not given, or are not under the interface, have nothing to do with it."""
    holding = Holding(servers.multiport(tmp_path))
    hca = servers.MULTIPORT_HCA
    holding.give(POD, {hca: [hca]})
    (held,) = pod_devices.given_to(holding.paths, POD).hcas
    assert [rdma.name for rdma in held.device.rdma] == ["mlx5_0", "smi1"]
    pod_devices.require_current(holding.paths, held, ["mlx5_0"])
    verbs = holding.paths.sys / "class/infiniband_verbs"
    for name, other in (("uverbs0", "smi1"), ("uverbs1", "mlx5_0")):
        (verbs / name / "ibdev").write_text(f"{other}\n")
    with pytest.raises(Stale):
        pod_devices.require_current(holding.paths, held, ["mlx5_0"])


def test_renamed_device_with_the_containers_number_is_the_same(holding: Holding) -> None:
    holding.give(POD, {A: [A]})
    (hca,) = pod_devices.given_to(holding.paths, POD).hcas
    (holding.paths.sys / "class/infiniband_verbs/uverbs0/ibdev").write_text("mlx5_77\n")
    pod_devices.require_current(holding.paths, hca, ["mlx5_77"])
    with pytest.raises(Stale):
        pod_devices.require_current(holding.paths, hca, ["mlx5_1"])
