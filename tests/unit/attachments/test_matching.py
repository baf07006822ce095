"""The interface of an attachment is of an HCA that the pod was given: `ipoib` and `sriov` ask."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from filelock import FileLock

from cni.attachments.matching import Match, matched, tell, verbs_beside
from cni.ipoib import options as ipoib_options
from cni.ipoib import parents
from cni.spec import arguments, interrupts
from cni.spec.errors import CNIError
from cni.spec.notes import collected
from cni.spec.request import Request
from cni.spec.result import Interface
from cni.sriov import devices
from cni.sriov import options as sriov_options
from deviceplugin.claims import Pod, lock_of
from deviceplugin.kubelet import records
from host import infiniband, links, pci
from host.links import ARPHRD_INFINIBAND, IFF_UP, Link
from host.netlink import Rtnetlink
from host.paths import Paths
from tests.unit.deviceplugin.holding import Holding
from tests.unit.host import servers
from tests.unit.host.sysfs import Tree

ROUTE = cast(Rtnetlink, "host")
A, B = servers.DGX_HCAS[:2]
VF, OTHER_VF = servers.VFS_ETHERNET[:2]
POD = Pod("ml", "worker-0", "uid-0")
OTHER = Pod("ml", "worker-1", "uid-1")
VFS = list(servers.VFS_ETHERNET)
CNI_ARGS = "IgnoreUnknown=1;K8S_POD_NAMESPACE=ml;K8S_POD_NAME=worker-0;K8S_POD_UID=uid-0"


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pf-") as name:  # short, for the sockets' paths
        yield Path(name)


@pytest.fixture
def server(root: Path, monkeypatch: pytest.MonkeyPatch) -> Holding:
    """Eight HCAs with the IPoIB interfaces ib0 to ib7, all up."""
    paths = servers.dgx(root)
    _show(paths, monkeypatch, "ipoib")
    return Holding(paths)


@pytest.fixture
def card(root: Path) -> Holding:
    """A card with VFs and an SF."""
    return Holding(servers.vfs(root))


def _show(paths: Paths, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    shown = {
        path.name: Link(
            index=int((path / "ifindex").read_text()),
            name=path.name,
            kind=kind,
            link_type=ARPHRD_INFINIBAND,
            mac=(path / "address").read_text().strip(),
            broadcast="",
            mtu=2044,
            flags=IFF_UP,
            pkey=0xFFFF,
            mode="datagram",
        )
        for path in sorted((paths.sys / "class/net").iterdir())
    }
    monkeypatch.setattr(links, "find", lambda route, name: shown.get(name))
    monkeypatch.setattr(links, "every", lambda route, kind="": list(shown.values()))


def request(ifname: str = "net1", cni_args: str = CNI_ARGS, **config: Any) -> Request:  # noqa: ANN401
    return Request(
        command="ADD",
        container_id="c1",
        ifname=ifname,
        args=cni_args,
        network="fabric",
        config=json.dumps({"name": "fabric", **config}).encode(),
    )


@contextmanager
def match_of(paths: Paths, call: Request, *, needed: bool, wanted: bool) -> Iterator[Match]:
    pairs = arguments.parse(call.args, ())
    match = matched(paths, call, arguments.pod_of(pairs), needed=needed, wanted=wanted)
    with match.choosing():
        yield match


def ipoib(node: Holding, ifname: str = "net1", cni_args: str = CNI_ARGS, **config: Any) -> str:  # noqa: ANN401
    """The parent that an ADD of `ipoib` takes."""
    call = request(ifname, cni_args, **{"type": "ipoib", "master": "auto"} | config)
    wanted = ipoib_options.read(call)
    ask = {"needed": not wanted.masters, "wanted": wanted.match_device}
    with match_of(node.paths, call, **ask) as match:
        plan = parents.choose(ROUTE, node.paths, wanted, match)
        match.take(plan.adapter)
    return plan.parent.name


def sriov(node: Holding, ifname: str = "net1", cni_args: str = CNI_ARGS, **config: Any) -> str:  # noqa: ANN401
    """The device that an ADD of `sriov` takes, if nothing is in the way of the first that fits."""
    call = request(ifname, cni_args, **{"type": "sriov"} | config)
    wanted = sriov_options.read(call)
    ask = {"needed": not wanted.device and not wanted.masters, "wanted": wanted.match_device}
    with match_of(node.paths, call, **ask) as match:
        refusals: list[CNIError] = []
        for address in devices.candidates(node.paths, wanted, match):
            function = pci.find(node.paths, address)
            assert function is not None
            plan = devices.Plan(function=function, link=None, vf=None)
            try:
                devices.require_match(node.paths, plan, wanted, match)
            except CNIError as refusal:
                refusals.append(refusal)
                continue
            match.take(devices.adapter_of(node.paths, plan, match))
            return address
    raise refusals[0]


def refusal(call: Any, *given: Any, **config: Any) -> CNIError:  # noqa: ANN401
    with pytest.raises(CNIError) as caught:
        call(*given, **config)
    return caught.value


def test_parent_is_on_the_pods_hca(server: Holding) -> None:
    server.give(POD, {f"{B}-5": [B]})
    assert ipoib(server) == "ib1"


def test_two_attachments_of_two_hcas_have_one_each_whatever_order_they_come_again(
    server: Holding,
) -> None:
    server.give(POD, {f"{B}-0": [B]}, container="first")
    server.give(POD, {f"{A}-0": [A]}, container="second")
    first = {name: ipoib(server, name) for name in ("net1", "net2")}
    assert first == {"net1": "ib1", "net2": "ib0"}
    assert {name: ipoib(server, name) for name in ("net2", "net1")} == first


def test_containers_of_a_pod_see_one_answer(server: Holding) -> None:
    """An init container's device is given on to a later container; neither order changes it."""
    server.give(POD, {f"{A}-0": [A]}, container="setup", init=True)
    server.give(POD, {f"{A}-0": [A]}, container="main")
    assert [ipoib(server, f"net{n}") for n in (1, 2)] == ["ib0", "ib0"]


def test_holder_of_all_has_one_attachment_on_each(server: Holding) -> None:
    server.give(POD, {"0": servers.DGX_HCAS})
    assert [ipoib(server, f"net{n}") for n in range(8)] == [f"ib{n}" for n in range(8)]


def test_token_of_all_that_multus_passes_means_each_hca_in_turn(server: Holding) -> None:
    server.give(POD, {"0": servers.DGX_HCAS, "1": servers.DGX_HCAS})
    first = [ipoib(server, f"net{n}", deviceID=token) for n, token in ((1, "0"), (2, "1"))]
    assert first == ["ib0", "ib1"]
    assert [ipoib(server, f"net{n}", deviceID=token) for n, token in ((2, "0"), (1, "1"))] == [
        "ib1",
        "ib0",
    ]
    refused = refusal(ipoib, server, "net3", deviceID="2")
    assert (refused.code, '"deviceID" is "2"' in refused.message) == (120, True)


def _down(node: Holding, number: int) -> None:
    port = f"class/infiniband/mlx5_{number}/ports/1"
    Tree(node.paths.sys, node.paths).write(f"{port}/state", "1: DOWN")


def test_parent_on_a_port_that_works_comes_first(server: Holding) -> None:
    server.give(POD, {"0": servers.DGX_HCAS[:3]})
    _down(server, 0)
    assert ipoib(server, "net1") == "ib1"
    _down(server, 1)
    assert ipoib(server, "net1") == "ib2"  # though it was on ib1 before
    _down(server, 2)
    assert ipoib(server, "net1") == "ib2"  # nothing else is better
    assert ipoib(server, "net2") == "ib0"
    assert ipoib(server, "net3", master=["ib0", "ib1"]) == "ib0"  # as it is written


@pytest.mark.parametrize("key", ["deviceID", "pciBusID", "runtimeConfig"])
@pytest.mark.parametrize("form", ["{}-4", "{}"], ids=["slot", "address"])
def test_device_id_chooses_among_the_pods_hcas(server: Holding, key: str, form: str) -> None:
    server.give(POD, {f"{A}-4": [A], f"{B}-4": [B]})
    known = form.format(B)
    config: dict[str, Any] = {key: {"deviceID": known} if key == "runtimeConfig" else known}
    assert ipoib(server, **config) == "ib1"


def test_device_id_that_the_pod_does_not_hold_is_refused_with_both(server: Holding) -> None:
    server.give(POD, {f"{A}-0": [A]})
    server.give(OTHER, {f"{B}-0": [B]})
    refused = refusal(ipoib, server, deviceID=f"{B}-0")
    assert refused.code == 120
    assert f'"deviceID" is "{B}-0", but pod ml/worker-0 was given {A} (mlx5_0, uverbs0' in (
        refused.message
    )


@pytest.mark.parametrize("held", [True, False])
def test_device_of_another_device_plugin_is_taken(server: Holding, held: bool) -> None:
    """The kubelet says that it is the pod's; or the runtime does, and the pod has none of ours."""
    if held:
        server.give(POD, {f"{A}-0": [A]})
        server.give(POD, {B: []}, resource="nvidia.com/hca")
    assert ipoib(server, deviceID=B) == "ib1"


def test_device_that_another_pod_has_for_itself_is_refused_with_its_resource(
    server: Holding,
) -> None:
    """Whatever the runtime says, and though this pod has no HCA to differ from."""
    server.give(OTHER, {B: [B]}, resource="rdma/whole")
    refused = refusal(ipoib, server, deviceID=B)
    assert refused.code == 120
    assert refused.message.startswith(
        f'"deviceID" {B} is on HCA {B}, which the kubelet gave to another pod as rdma/whole: '
    )
    server.give(POD, {B: []}, resource="other/thing")
    assert refusal(ipoib, server, deviceID=B).code == 120
    assert ipoib(server, master="ib1") == "ib1"  # nothing to differ from


def test_vf_that_another_pod_has_for_itself_is_refused_with_its_resource(card: Holding) -> None:
    card.give(OTHER, {VF: [VF]}, resource="rdma/whole")
    refused = refusal(sriov, card, deviceID=VF)
    assert refused.code == 120
    assert f"device {VF} is on HCA {VF}, which the kubelet gave to another pod as rdma/whole" in (
        refused.message
    )
    assert sriov(card, deviceID=VF, match_device=False) == VF
    assert sriov(card, deviceID=VF, cni_args="") == VF  # nobody knows whose it is
    card.kubelets_checkpoint.unlink()
    with collected() as notes:
        assert sriov(card, deviceID=VF) == VF
    assert "not compared with the pod's verbs devices" in notes.text


def test_device_of_a_resource_claim_is_the_pods(
    card: Holding, monkeypatch: pytest.MonkeyPatch
) -> None:
    card.give(POD, {VF: [VF]})
    assert refusal(sriov, card, deviceID=OTHER_VF).code == 120
    row = records.PodDevices(
        namespace="ml",
        name="worker-0",
        uid="",
        container="main",
        resource="dra.net/node-1",
        ids=("0000-3c-00-3", OTHER_VF),
        claimed=True,
    )
    monkeypatch.setattr(records, "from_pod_resources", lambda *given, **more: [row])
    assert sriov(card, deviceID=OTHER_VF) == OTHER_VF


def test_explicit_parent_on_another_hca_is_refused_with_both(server: Holding) -> None:
    server.give(POD, {f"{A}-0": [A]})
    refused = refusal(ipoib, server, master="ib1")
    assert refused.code == 120
    assert refused.message == (
        f'parent "ib1" is on HCA {B} (mlx5_1), but pod ml/worker-0 was given {A} (mlx5_0, '
        'uverbs0 231:192) of rdma/hca: set "master": "auto", or "match_device": false if that '
        "is meant"
    )
    assert ipoib(server, master=["ib1", "ib0"]) == "ib0"
    assert ipoib(server, master="ib1", match_device=False) == "ib1"


def test_pod_without_hca_may_have_any_parent(server: Holding) -> None:
    server.give(OTHER, {f"{A}-0": [A]})
    assert ipoib(server, master="ib1") == "ib1"
    assert ipoib(server, master="ib1", cni_args="") == "ib1"


def test_auto_without_hca_or_pod_is_an_error(server: Holding) -> None:
    server.give(OTHER, {f"{A}-0": [A]})
    refused = refusal(ipoib, server)
    assert (refused.code, "pod ml/worker-0 was given no HCA" in refused.message) == (120, True)
    nameless = refusal(ipoib, server, cni_args="")
    assert (nameless.code, "K8S_POD_NAME" in nameless.message) == (4, True)


def test_hca_without_parent_is_named(server: Holding, monkeypatch: pytest.MonkeyPatch) -> None:
    server.give(POD, {f"{A}-0": [A]})
    monkeypatch.setattr(links, "every", lambda route, kind="": [])
    refused = refusal(ipoib, server)
    assert refused.code == 120
    assert f"no IPoIB interface of the host is on {A} (mlx5_0" in refused.message


def test_parent_of_either_port_is_on_the_hca(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = servers.multiport(root)
    _show(paths, monkeypatch, "ipoib")
    node = Holding(paths)
    node.give(POD, {"x-0": []}, resource="other/thing")
    node.give(POD, {f"{servers.MULTIPORT_HCA}-0": [servers.MULTIPORT_HCA]})
    assert ipoib(node) == "ib0"
    assert ipoib(node, master="ib1") == "ib1"
    tree = Tree(paths.sys, paths)
    ib0 = links.find(ROUTE, "ib0")
    assert ib0 is not None
    assert infiniband.port_of(paths, ib0) is not None
    tree.write("class/infiniband/mlx5_0/ports/1/pkeys/0", "0x8001")
    assert ipoib(node) == "ib1"  # the first that can carry the child


def test_kubelet_that_cannot_be_asked(server: Holding) -> None:
    server.give(POD, {f"{A}-0": [A]})
    server.kubelets_checkpoint.unlink()
    refused = refusal(ipoib, server)
    assert refused.code == 11
    assert "cannot tell which HCAs pod ml/worker-0 was given" in refused.message
    with collected() as notes:
        assert ipoib(server, master="ib1") == "ib1"
    assert "not compared with the pod's verbs devices: cannot tell" in notes.text
    with collected() as notes:
        assert ipoib(server, master="ib1", match_device=False) == "ib1"
    assert notes.text == ""


@pytest.mark.parametrize("config", [{}, {"master": "ib0"}])
def test_driver_that_was_loaded_anew_is_told_with_both_numbers(
    server: Holding, config: dict[str, Any]
) -> None:
    server.give(POD, {f"{A}-0": [A]})
    _swap(server.paths, 0, 1)
    refused = refusal(ipoib, server, **config)
    assert refused.code == 120
    for named in ("uverbs0 231:192", "uverbs1 231:193 now", A):
        assert named in refused.message


def _swap(paths: Paths, first: int, second: int) -> None:
    """The RDMA devices mlx5_N of these numbers have one another's uverbs devices."""
    tree = Tree(paths.sys, paths)
    for number in (first, second):
        link = tree.root / f"class/infiniband_verbs/uverbs{number}"
        shutil.rmtree(link.resolve())
        link.unlink()
    for number, other in ((first, second), (second, first)):
        dev = f"{servers.MAJOR}:{servers.UVERBS + other}"
        tree.character("infiniband_verbs", f"uverbs{other}", f"mlx5_{number}", dev)


def test_vf_is_the_pods(card: Holding) -> None:
    card.give(OTHER, {VF: [VF]})
    card.give(POD, {OTHER_VF: [OTHER_VF]})
    assert sriov(card) == OTHER_VF
    assert sriov(card, deviceID=OTHER_VF, runtimeConfig={"deviceID": OTHER_VF}) == OTHER_VF
    assert sriov(card, master="enp59s0f1np0") == OTHER_VF


def test_two_attachments_of_two_vfs_have_one_each_and_again_the_same(card: Holding) -> None:
    card.give(POD, {VF: [VF], OTHER_VF: [OTHER_VF]})
    assert [sriov(card, name) for name in ("net1", "net2")] == [VF, OTHER_VF]
    assert [sriov(card, name) for name in ("net2", "net1")] == [OTHER_VF, VF]


def test_vf_of_another_pod_is_refused_with_both(card: Holding) -> None:
    card.give(POD, {VF: [VF]})
    card.give(OTHER, {OTHER_VF: [OTHER_VF]})
    refused = refusal(sriov, card, deviceID=OTHER_VF)
    assert refused.code == 120
    assert refused.message == (
        f"device {OTHER_VF} is on HCA {OTHER_VF} (mlx5_7), but pod ml/worker-0 was given {VF} "
        '(mlx5_6, uverbs6 231:198) of rdma/hca: leave "deviceID" and "master" out, or '
        '"match_device": false if that is meant'
    )
    assert sriov(card, deviceID=OTHER_VF, match_device=False) == OTHER_VF


def test_free_vf_of_a_master_is_nobodys(card: Holding) -> None:
    card.give(OTHER, {VF: [VF]})
    assert sriov(card, master="enp59s0f1np0") == OTHER_VF


@pytest.mark.parametrize("ids", [{"0": VFS}, {f"{vf}-0": [vf] for vf in VFS}])
def test_vfs_that_others_share_are_free_for_a_master(
    card: Holding, ids: dict[str, list[str]]
) -> None:
    card.give(OTHER, ids)
    assert sriov(card, master="enp59s0f1np0") == VF


def test_master_without_a_free_vf_names_the_resources_that_have_them(card: Holding) -> None:
    for number, vf in enumerate(VFS):
        card.give(OTHER, {vf: [vf]}, resource=f"rdma/vf{number % 2}")
    refused = refusal(sriov, card, master="enp59s0f1np0")
    assert refused.code == 11
    for number, vf in enumerate(VFS):
        assert f"{vf} as rdma/vf{number % 2}" in refused.message
    assert "of enp59s0f1np0 to other pods" in refused.message
    assert "driver" not in refused.message


def test_pod_with_other_hcas_gets_no_vf_of_a_master(card: Holding) -> None:
    card.give(POD, {servers.VFS[0]: [servers.VFS[0]]})
    refused = refusal(sriov, card, master="enp59s0f1np0")
    assert (refused.code, f"was given {servers.VFS[0]}" in refused.message) == (120, True)


def test_pod_with_hcas_but_no_vf_is_told_what_it_has(card: Holding) -> None:
    card.give(POD, {f"{servers.VFS_PF}-0": [servers.VFS_PF]})
    refused = refusal(sriov, card)
    assert refused.code == 120
    assert f"was given {servers.VFS_PF} (mlx5_0" in refused.message
    assert sriov(card, pfOnly=True) == servers.VFS_PF


def test_sf_is_a_device_like_a_vf(card: Holding) -> None:
    card.give(POD, {servers.VFS_SF: [servers.VFS_SF]})
    assert sriov(card) == servers.VFS_SF


def test_pod_that_was_given_nothing_needs_a_device(card: Holding) -> None:
    refused = refusal(sriov, card)
    assert (refused.code, '"deviceID" is missing' in refused.message) == (7, True)


def test_pod_with_a_soft_roce_device_gets_the_vf_below_it(card: Holding) -> None:
    tree = Tree(card.paths.sys, card.paths)
    for number, vf in enumerate((VF, OTHER_VF)):
        _without_verbs(tree, vf)
        tree.soft_rdma(f"rxe{number}", f"enp59s0f1v{number}")
        tree.character(
            "infiniband_verbs", f"uverbs{20 + number}", f"rxe{number}", f"231:{212 + number}"
        )
    card.give(POD, {"rxe1-0": ["rxe1"]}, resource="rdma/soft")
    assert sriov(card) == OTHER_VF
    assert sriov(card, deviceID=OTHER_VF) == OTHER_VF
    refused = refusal(sriov, card, deviceID=VF)
    assert (refused.code, "was given rxe1 (rxe1, uverbs21 231:213)" in refused.message) == (
        120,
        True,
    )
    # The id of the pool, as Multus passes it.
    for known in ("rxe1-0", "rxe1"):
        assert sriov(card, deviceID=known, pciBusID=known, master="enp59s0f1np0") == OTHER_VF
    refused = refusal(sriov, card, deviceID="rxe0-0")
    assert (refused.code, '"deviceID": "rxe0-0" is no device' in refused.message) == (7, True)


def test_token_of_all_is_each_vf_of_the_pool_in_turn(card: Holding) -> None:
    card.give(POD, {"0": [VF, OTHER_VF], "1": [VF, OTHER_VF]})
    card.give(POD, {servers.VFS[0]: [servers.VFS[0]]}, resource="rdma/other")
    tokens = {"net1": "1", "net2": "0"}
    assert [sriov(card, name, deviceID=token) for name, token in tokens.items()] == [VF, OTHER_VF]
    assert sriov(card, "net2", deviceID="0") == OTHER_VF


@pytest.mark.parametrize("cni_args", [CNI_ARGS, ""])
def test_device_id_that_nothing_explains_is_told_as_before(card: Holding, cni_args: str) -> None:
    refused = refusal(sriov, card, cni_args=cni_args, deviceID="0", master="enp59s0f1np0")
    assert (
        refused.code,
        '"deviceID": "0" is no device: give a PCI address' in refused.message,
    ) == (
        7,
        True,
    )


def _without_verbs(tree: Tree, address: str) -> None:
    device = tree.device(address)
    for kind in ("infiniband_verbs", "infiniband_mad", "infiniband"):
        for entry in list((device / kind).iterdir()) if (device / kind).exists() else []:
            (tree.root / "class" / kind / entry.name).unlink()
            entry.rename(tree.root / f"gone-{entry.name}")


def test_device_without_verbs_has_nothing_to_differ_in(card: Holding) -> None:
    _without_verbs(Tree(card.paths.sys, card.paths), VF)
    card.give(POD, {servers.VFS[0]: [servers.VFS[0]]})
    assert sriov(card, deviceID=VF) == VF


def test_vf_whose_driver_was_bound_anew_is_told_with_both_numbers(card: Holding) -> None:
    card.give(POD, {VF: [VF]})
    _swap(card.paths, 6, 7)
    refused = refusal(sriov, card)
    assert refused.code == 120
    for named in ("uverbs6 231:198", "uverbs7 231:199 now", VF):
        assert named in refused.message


def test_attachments_at_once_are_on_different_hcas(server: Holding) -> None:
    server.give(POD, {"0": servers.DGX_HCAS})
    with ThreadPoolExecutor(8) as pool:
        chosen = list(pool.map(lambda n: ipoib(server, f"net{n}"), range(8)))
    assert sorted(chosen) == [f"ib{n}" for n in range(8)]
    assert list(server.paths.locks.iterdir()) == []


def test_attachment_that_waits_for_another_of_its_pod_can_be_ended(server: Holding) -> None:
    server.give(POD, {f"{A}-0": [A]})
    call = interrupts.Call(endable=True)

    def waiting() -> str:
        with interrupts.serving(call):
            return ipoib(server)

    with (
        FileLock(_made(lock_of(server.paths, POD))),
        ThreadPoolExecutor(1) as pool,
    ):
        choosing = pool.submit(waiting)
        call.end()
        with pytest.raises(interrupts.Terminated):
            choosing.result(20)


def _made(lock: Path) -> Path:
    lock.parent.mkdir(parents=True)
    return lock


def test_verbs_device_is_told_in_multus_file(card: Holding, tmp_path: Path) -> None:
    paths = msgspec.structs.replace(card.paths, devinfo=tmp_path)
    file = tmp_path / "cni/ml-fabric-c1_net1"
    file.parent.mkdir()
    file.write_text(json.dumps({"type": "pci", "version": "1.1.0", "pci": {"pci-address": VF}}))
    assert verbs_beside(card.paths, ["mlx5_6"]) == ("mlx5_6", "uverbs6")
    assert verbs_beside(card.paths, ["mlx5_99"]) == ("", "")
    interface = Interface(name="net1", pciID=VF, rdmaDevice="mlx5_6", uverbs="uverbs6")
    tell(paths, request(runtimeConfig={"CNIDeviceInfoFile": str(file)}), interface)
    written = json.loads(file.read_bytes())
    assert written["pci"] == {"pci-address": VF, "rdma-device": "mlx5_6"}
    assert written["podfabric"] == {"uverbs": "uverbs6", "major": 231, "minor": 198}


def test_multus_file_that_cannot_be_written_is_a_note(card: Holding, tmp_path: Path) -> None:
    interface = Interface(name="net1", pciID=VF, rdmaDevice="mlx5_6", uverbs="uverbs6")
    paths = msgspec.structs.replace(card.paths, devinfo=tmp_path)
    (tmp_path / "cni").write_text("")
    with collected() as notes:
        path = str(tmp_path / "cni/info.json")
        tell(paths, request(runtimeConfig={"CNIDeviceInfoFile": path}), interface)
        gone = msgspec.structs.replace(interface, rdmaDevice="mlx5_99")
        tell(paths, request(runtimeConfig={"CNIDeviceInfoFile": path}), gone)
        tell(paths, request(runtimeConfig=5), interface)
    assert notes.text.count(f"device information {path}: ") == 2
