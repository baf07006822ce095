"""Allocations that only the kubelet knows, and state that outlives pods.

It uses the simulated server of node.py.
"""

import functools
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from base.paths import Paths, boot_id_of
from base.pod import Pod
from deviceplugin import checkpoint, pod_devices
from deviceplugin.api import v1beta1_pb2
from deviceplugin.checkpoint import Allocation
from deviceplugin.kubelet import records
from deviceplugin.kubelet.pod_resources import PodResourcesClient
from deviceplugin.ledger import Ledger
from deviceplugin.pod_devices import Stale, Unknown
from deviceplugin.pools.pool_config import PoolConfig
from tests.host.deviceplugin.node import (
    FIRST,
    HCA,
    SHARED,
    Node,
    config,
    container,
    keep_allocations,
    port,
)
from tests.kubelet import Kubelet, Request
from tests.kubelet import Pod as Admitted
from tests.kubelet.devices import Held
from tests.unit.host import servers
from tests.unit.host.sysfs import Tree
from tests.waiting import PATIENCE

EXCLUSIVE = config(PoolConfig(resource=HCA, mode="exclusive"))


@pytest.fixture
def kubelet(server: Paths) -> Iterator[Kubelet]:
    with Kubelet(server.kubelet) as own_kubelet:
        yield own_kubelet


@pytest.fixture
def node(server: Paths, kubelet: Kubelet) -> Iterator[Node]:
    """A node on which every HCA is exclusive to one pod."""
    new_node = Node(server, EXCLUSIVE)
    kubelet.wait(lambda: kubelet.allocatable(HCA) == 8)
    yield new_node
    new_node.plugin.close()


@pytest.fixture
def grow_old(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function after which every allocation counts as old enough for the kubelet's record."""
    old = functools.partialmethod(Ledger.drop_unknown, age=-1.0)
    return lambda: monkeypatch.setattr(Ledger, "drop_unknown", old)


def held(paths: Paths) -> dict[str, Allocation]:
    return {allocation.id: allocation for allocation in checkpoint.read(paths).allocations}


def uverbs_of(allocation: Allocation) -> str:
    (rdma,) = allocation.devices[0].rdma
    assert rdma.uverbs is not None
    return rdma.uverbs.path.rpartition("/")[2]


def reload_all(paths: Paths) -> None:
    """Reload every driver: no HCA keeps a uverbs number that any HCA had."""
    tree = Tree(paths.sys, paths)
    for number in range(8):
        old = paths.sys / f"class/infiniband_verbs/uverbs{number}"
        name = (old / "ibdev").read_text().strip()
        shutil.rmtree(old.resolve())
        old.unlink()
        tree.character("infiniband_verbs", f"uverbs{number + 20}", name, f"231:{212 + number}")


def exchange(paths: Paths, first: str, second: str) -> None:
    """Exchange the uverbs numbers of two HCAs."""
    files = [paths.sys / f"class/infiniband_verbs/{name}/ibdev" for name in (first, second)]
    contents = [file.read_text() for file in files]
    for file, content in zip(files, reversed(contents), strict=True):
        file.write_text(content)


def all_are_back(node: Node, kubelet: Kubelet) -> None:
    """Wait for all ids after pods have gone. A comparison makes the kubelet write its file; the
    next one reads it."""
    node.plugin.compare()
    kubelet.wait(lambda: records.from_checkpoint(node.paths) == [])
    node.plugin.compare()
    assert held(node.paths) == {}
    kubelet.wait(lambda: kubelet.allocatable(HCA) == 8)


def test_ids_return_after_the_pods_that_a_reload_made_stale(
    node: Node, kubelet: Kubelet, grow_old: Callable[[], None]
) -> None:
    """The kubelet frees their devices in memory only, and writes nothing while nothing is
    allocatable."""
    pods = [kubelet.admit(f"worker-{number}", [container()]) for number in range(8)]
    reload_all(node.paths)
    kubelet.wait(lambda: kubelet.allocatable(HCA) == 0)
    for pod in pods:
        kubelet.remove(pod)
    grow_old()
    all_are_back(node, kubelet)


def test_an_hca_comes_back_when_the_pods_of_a_resource_that_is_no_more_are_gone(
    node: Node, kubelet: Kubelet, grow_old: Callable[[], None]
) -> None:
    """No list of that resource can be sent any more."""
    pod = kubelet.admit("worker-0", [container()])
    node.plugin.reconfigure(config(PoolConfig(resource="rdma/new", mode="exclusive")))
    kubelet.wait(lambda: kubelet.capacity("rdma/new") == 7)
    kubelet.remove(pod)
    grow_old()
    node.plugin.compare()
    kubelet.wait(lambda: records.from_checkpoint(node.paths) == [])
    node.plugin.compare()
    kubelet.wait(lambda: kubelet.allocatable("rdma/new") == 8)


def test_the_same_list_is_sent_only_for_what_the_kubelet_has_not_written_down(
    node: Node, kubelet: Kubelet
) -> None:
    endpoint = kubelet.endpoint(HCA)
    assert endpoint is not None
    pod = kubelet.admit("worker-0", [container()])
    kubelet.wait(lambda: records.from_checkpoint(node.paths) != [])
    sent = len(endpoint.lists)
    node.plugin.compare()
    kubelet.remove(pod)
    node.plugin.compare()
    kubelet.wait(lambda: records.from_checkpoint(node.paths) == [])
    assert len(endpoint.lists) == sent + 1
    assert endpoint.lists[-1] == endpoint.lists[-2]


def lose_checkpoint(node: Node, kubelet: Kubelet) -> None:
    registered = kubelet.count("Register", HCA)
    node.plugin.close()
    node.paths.checkpoint.unlink()
    node.restart()
    kubelet.wait(lambda: kubelet.count("Register", HCA) > registered)
    kubelet.wait(lambda: held(node.paths))


def test_adopted_allocation_has_the_containers_device_node(node: Node, kubelet: Kubelet) -> None:
    """While the plugin was down, another HCA got its number."""
    pod = kubelet.admit("worker-0", [container()])
    (before,) = held(node.paths).values()
    theirs = uverbs_of(before)
    exchange(node.paths, theirs, "uverbs7" if theirs != "uverbs7" else "uverbs6")
    lose_checkpoint(node, kubelet)
    (after,) = held(node.paths).values()
    assert after.adopted
    assert after.devices[0].rdma[0].uverbs == before.devices[0].rdma[0].uverbs
    kubelet.wait(lambda: kubelet.allocatable(HCA) == 7)
    assert not kubelet.devices(HCA)[before.id][0]
    (face,) = pod_devices.given_to(node.paths, Pod("default", "worker-0", pod.uid)).hcas
    with pytest.raises(Stale, match=f"the container got RDMA device mlx5_., {theirs}"):
        pod_devices.require_current(node.paths, face, [face.device.rdma[0].name])


@pytest.mark.parametrize("kept", [0, 1, 2], ids=["none", "one", "two"])
def test_what_an_older_checkpoint_lacks_is_adopted(node: Node, kubelet: Kubelet, kept: int) -> None:
    """The disk is broken, or a backup was restored: the kubelet has the missing allocations."""
    for number in range(3):
        kubelet.admit(f"worker-{number}", [container()])
    before = held(node.paths)
    node.plugin.close()
    keep_allocations(node.paths, kept)
    assert len(held(node.paths)) == kept
    node.restart()
    kubelet.wait(lambda: len(held(node.paths)) == 3)
    after = held(node.paths)
    assert [allocation.adopted for allocation in after.values()].count(True) == 3 - kept
    assert {known: allocation.devices for known, allocation in after.items()} == {
        known: allocation.devices for known, allocation in before.items()
    }


@pytest.mark.parametrize("older", [False, True], ids=["", "an earlier pod had the token"])
@pytest.mark.parametrize("names", [False, True], ids=["nodes", "CDI"])
def test_token_that_an_older_checkpoint_lacks_is_adopted_as_it_was(
    server: Paths, kubelet: Kubelet, older: bool, names: bool
) -> None:
    """The container has the HCAs that worked then."""
    node = Node(server, config(PoolConfig(resource=HCA, mode="all", amount=1, cdi=names)))
    try:
        kubelet.wait(lambda: kubelet.allocatable(HCA) == 1)
        before_that = server.checkpoint.read_bytes()
        if older:
            kubelet.remove(kubelet.admit("worker-0", [container()]))
            before_that = server.checkpoint.read_bytes()
        port(server, 3, up=False)
        node.plugin.look()
        pod = kubelet.admit("worker-1", [container()])
        (before,) = held(server).values()
        assert len(before.devices) == 7
        node.plugin.close()
        server.checkpoint.write_bytes(before_that)
        port(server, 3, up=True)
        (server.proc / "sys/kernel/random/boot_id").write_text("the-next-boot\n")
        boot_id_of.cache_clear()
        kubelet.restart()
        node.restart()
        (after,) = held(server).values()
        assert [device.id for device in after.devices] == [device.id for device in before.devices]
        node.plugin.compare()
        given = pod_devices.given_to(server, Pod("default", "worker-1", pod.uid))
        assert {face.device.id for face in given.hcas} == {device.id for device in before.devices}
    finally:
        node.plugin.close()


def test_what_the_kubelet_has_written_down_is_taken_over_before_anything_is_offered(
    server: Paths, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise another pool would give it away meanwhile: PodResources may answer late."""
    pools = [PoolConfig(resource=name, mode="exclusive", overlap=True) for name in (HCA, "rdma/b")]
    node = Node(server, config(*pools))
    try:
        kubelet.wait(lambda: kubelet.allocatable(HCA) == kubelet.allocatable("rdma/b") == 8)
        kubelet.admit("worker-0", [container()])
        (known,) = held(server)
        node.plugin.close()
        server.checkpoint.unlink()
        asked = threading.Event()

        def slow(_: object, timeout: float) -> None:
            asked.set()
            raise records.KubeletUnreadable("DEADLINE_EXCEEDED")

        monkeypatch.setattr(PodResourcesClient, "list", slow)
        kubelet.restart()
        node.restart()
        kubelet.wait(lambda: kubelet.capacity("rdma/b") == 8)
        assert not kubelet.devices("rdma/b")[known][0]
        assert asked.wait(PATIENCE)
        assert [allocation.resource for allocation in checkpoint.read(server).allocations] == [HCA]
    finally:
        node.plugin.close()


@pytest.mark.parametrize("what", ["damaged", "a full disk"])
def test_pools_are_served_though_nothing_could_be_taken_over_at_the_start(
    node: Node, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    kubelet.admit("worker-0", [container()])
    node.plugin.close()
    node.paths.checkpoint.unlink()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        if what == "damaged":
            file = node.paths.device_plugins / "kubelet_internal_checkpoint"
            file.write_bytes(file.read_bytes()[:-20])
        else:
            patched.setattr("os.pwrite", full)
        registered = kubelet.count("Register", HCA)
        node.restart()
        kubelet.wait(lambda: kubelet.count("Register", HCA) > registered)
        kubelet.wait(lambda: kubelet.capacity(HCA) == 8)
    node.plugin.compare()
    assert len(held(node.paths)) == 1


def test_hca_that_is_shared_is_not_given_to_one_alone_though_the_checkpoint_was_lost(
    server: Paths, kubelet: Kubelet
) -> None:
    node = Node(server, SHARED)
    try:
        kubelet.wait(lambda: kubelet.allocatable(HCA) == 32)
        kubelet.admit("worker-0", [container()])
        (before,) = held(server).values()
        node.configuration = EXCLUSIVE
        lose_checkpoint(node, kubelet)
        kubelet.wait(lambda: kubelet.capacity(HCA) == 8 and kubelet.allocatable(HCA) == 7)
        assert not kubelet.devices(HCA)[before.devices[0].id][0]
        assert held(server)[before.id].devices == before.devices
    finally:
        node.plugin.close()


def run_on(paths: Paths, kubelet: Kubelet, resource: str, known: str, *uverbs: int) -> Pod:
    """A pod that was admitted when another device plugin served the resource."""
    nodes = [paths.dev / f"infiniband/uverbs{number}" for number in uverbs]
    response = v1beta1_pb2.ContainerAllocateResponse(
        devices=[{"host_path": str(path), "container_path": str(path)} for path in nodes]
    )
    pod = Admitted(
        name="old",
        namespace="ml",
        uid="u-1",
        requests=[Request(name="main", limits={resource: 1})],
    )
    held_ids = Held(
        uid="u-1", container="main", resource=resource, devices={known: ()}, response=response
    )
    kubelet.hold([held_ids], {"u-1": pod})
    return Pod("ml", "old", "u-1")


ALL = frozenset(servers.DGX_HCAS)


@pytest.mark.parametrize(
    ("mode", "known", "uverbs", "hcas"),
    [
        pytest.param("exclusive", "mlx5_3", [3], {servers.DGX_HCAS[3]}, id="k8s-rdma"),
        pytest.param("exclusive", "mlx5_3", [], {servers.DGX_HCAS[3]}, id="k8s-rdma, CDI"),
        pytest.param("all", "ib-plugin/infiniband-0", range(8), ALL, id="k8s-ib"),
        pytest.param("all", "ib-plugin/infiniband-0", [], ALL, id="k8s-ib, CDI"),
        pytest.param("exclusive", "17", [2, 5], {servers.DGX_HCAS[n] for n in (2, 5)}, id="shared"),
        pytest.param("shared", servers.DGX_HCAS[4], [4], {servers.DGX_HCAS[4]}, id="sriov"),
    ],
)
def test_pods_of_another_device_plugin_run_on(
    server: Paths, kubelet: Kubelet, mode: str, known: str, uverbs: list[int], hcas: set[str]
) -> None:
    pod = run_on(server, kubelet, HCA, known, *uverbs)
    node = Node(server, config(PoolConfig(resource=HCA, mode=mode)))  # type: ignore[arg-type]
    try:
        kubelet.wait(lambda: held(server))
        assert {face.device.id for face in pod_devices.given_to(server, pod).hcas} == hcas
        if mode == "exclusive":
            kubelet.wait(lambda: kubelet.allocatable(HCA) == 8 - len(hcas))
    finally:
        node.plugin.close()


def test_failed_adoption_is_logged_with_the_remedy(server: Paths, kubelet: Kubelet) -> None:
    pod = run_on(server, kubelet, HCA, "17")
    node = Node(server, EXCLUSIVE)
    try:
        kubelet.wait(lambda: held(server))
        for _ in range(2):
            with pytest.raises(
                Unknown, match=r"holds 17 of rdma/hca, but the HCA of this id is unknown.*: delete"
            ):
                pod_devices.given_to(server, pod)
            node.plugin.compare()
        kubelet.wait(lambda: kubelet.allocatable(HCA) == 8)
    finally:
        node.plugin.close()


def test_hca_that_returns_is_adopted(server: Paths, kubelet: Kubelet) -> None:
    whole = Path(f"{server.sys}-whole")
    shutil.copytree(server.sys, whole, symlinks=True)
    Tree(server.sys, server).remove(FIRST)
    pod = run_on(server, kubelet, HCA, FIRST, 0)
    node = Node(server, EXCLUSIVE)
    try:
        kubelet.wait(lambda: held(server))
        (face,) = pod_devices.given_to(server, pod).hcas
        assert (face.device.id, face.device.rdma) == (FIRST, ())
        kubelet.wait(lambda: kubelet.capacity(HCA) == 8)
        shutil.rmtree(server.sys)
        shutil.copytree(whole, server.sys, symlinks=True)
        node.plugin.look()
        node.plugin.compare()
        (face,) = pod_devices.given_to(server, pod).hcas
        assert face.device.id == FIRST
        assert uverbs_of(held(server)[FIRST]) == "uverbs0"
    finally:
        node.plugin.close()


def information(paths: Paths) -> dict[str, str]:
    """The HCA of each device-information file."""
    return {
        file.name: json.loads(file.read_bytes())["pci"]["pci-address"]
        for file in (paths.devinfo / "dp").glob("*-device.json")
    }


@pytest.mark.parametrize("lost", [False, True])
def test_device_information_is_made_again_after_a_reboot(
    node: Node, kubelet: Kubelet, lost: bool
) -> None:
    """The kubelet starts its pods again and calls no Allocate; /var/run is empty."""
    kubelet.admit("worker-0", [container(count=2)])
    before = information(node.paths)
    assert len(before) == 2
    node.plugin.close()
    shutil.rmtree(node.paths.devinfo)
    if lost:
        node.paths.checkpoint.unlink()
    node.restart()
    kubelet.wait(lambda: information(node.paths) == before)
    node.plugin.compare()
    assert information(node.paths) == before


def test_no_device_information_is_made_of_an_hca_with_another_number(
    node: Node, kubelet: Kubelet
) -> None:
    kubelet.admit("worker-0", [container(count=2)])
    first, second = held(node.paths).values()
    other = next(
        f"uverbs{n}" for n in range(8) if f"uverbs{n}" not in map(uverbs_of, (first, second))
    )
    exchange(node.paths, uverbs_of(first), other)
    shutil.rmtree(node.paths.devinfo)
    node.plugin.compare()
    assert list(information(node.paths).values()) == [second.id]


def test_resources_that_could_not_be_written_down_are_with_the_next_comparison(
    server: Paths, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the CNI plugins would take our ids for another driver's."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("deviceplugin.checkpoint.write", full)
        node = Node(server, EXCLUSIVE)
        kubelet.wait(lambda: kubelet.allocatable(HCA) == 8)
        assert checkpoint.read(server).offered == {}
    try:
        node.plugin.compare()
        assert list(checkpoint.read(server).offered) == [HCA]
    finally:
        node.plugin.close()
