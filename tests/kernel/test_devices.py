"""Pools on real drivers: a pod's uverbs device and its interface belong to the same HCA.

The tests prove this inside the pod, by the device numbers in its sysfs and of its device nodes.
"""

import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from deviceplugin.allocate import job_config
from deviceplugin.pools import formats
from deviceplugin.pools.pool_config import PoolConfig
from host.sysfs.selectors import Selector
from policy import rules
from policy.rules import Policy
from tests.kernel import cards, igb
from tests.kernel.cards import Card
from tests.kernel.devices import (
    PoolNode,
    beside,
    fabric_beside,
    number_of,
    pool_node,
    uverbs_numbers,
)
from tests.kernel.igb import RDMA
from tests.kernel.pods import IP, ipam, knob, link_names, pings, pod, run
from tests.kubelet import Pod

HCA, VF = "rdma/hca", "example.com/vf"
RANGE = ipam("10.77.0.0/24")
NAMES = ("worker-0", "worker-1")
HEALTH_SECONDS = 2.0


@pytest.fixture
def netns() -> Iterator[None]:
    """The namespaces of two pods."""
    with ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(pod(name))
        yield


@pytest.fixture
def shared(netns: None) -> Iterator[PoolNode]:
    """Four slots for each of the guest's two HCAs."""
    selector = Selector(rdmaDevices=("ibloop0", "ibloop1"))
    with pool_node(PoolConfig(resource=HCA, slots=4, selectors=(selector,))) as node:
        node.await_healthy(HCA, 8)
        yield node


@pytest.fixture(scope="module")
def fresh_vfs(card: Card) -> Iterator[Card]:
    """HCAs on two VFs: one next to igbvf and its interface, one in its place. Interfaces are
    down."""
    igb.unbind(card.vfs[1])
    with igb.with_hcas(card.vfs[0], card.vfs[1]):
        yield card
    igb.bind(card.vfs[1], "igbvf")


@pytest.fixture
def vfs(fresh_vfs: Card) -> Card:
    """The same VFs with their links up."""
    for vf in fresh_vfs.vfs[:2]:
        for name in (path.parent.name for path in cards.DEVICES.glob(f"{vf}/net/*/pkey")):
            run(IP, "link", "set", name, "up")
            igb.await_carrier(name)
    return fresh_vfs


@pytest.fixture
def without_link(fresh_vfs: Card) -> Iterator[None]:
    """The VFs' ports are DOWN, like those of InfiniBand VFs without a GUID."""
    for number in (0, 1):
        knob(number, "port").write_text("down")
    yield
    for number in (0, 1):
        knob(number, "port").write_text("up")


def attached(node: PoolNode, pods: list[Pod]) -> list[dict[str, Any]]:
    """The interfaces of simultaneous ADDs of `sriov`."""
    with ThreadPoolExecutor(len(pods)) as pool:
        return [worker.interface for worker in pool.map(partial(node.add, node.sriov), pods)]


def test_ipoib_children_are_on_the_hcas_of_their_pods(shared: PoolNode) -> None:
    pods = [shared.admit(name, HCA) for name in NAMES]
    assert uverbs_numbers(pods[0]) != uverbs_numbers(pods[1])  # spread over the HCAs
    config = {"ipam": RANGE}
    with ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(lambda worker: shared.add(shared.ipoib, worker, **config), pods))
    for worker, reply in zip(pods, replies, strict=True):
        assert fabric_beside(worker.name) == uverbs_numbers(worker)
        assert number_of(reply.interface["rdmaDevice"]) == uverbs_numbers(worker)[0]
        assert reply.interface["uverbs"] in str(worker.containers["main"].devices)
    assert pings(pods[0].name, replies[1].addresses[0])
    assert pings(pods[1].name, replies[0].addresses[0])
    for worker in pods:
        shared.delete(shared.ipoib, worker, **config)
        shared.kubelet.remove(worker)
    assert shared.ipoib.leftovers() == []
    assert len(shared.held()) == 2
    third = shared.admit("worker-2", HCA)
    shared.forget_young_too()
    assert shared.held() == [(HCA, third.containers["main"].ids[HCA][0])]


def test_pod_with_two_hcas_has_an_interface_on_each_and_again_the_same(shared: PoolNode) -> None:
    worker = shared.admit(NAMES[0], HCA, 2)
    assert len(uverbs_numbers(worker)) == 2
    names = ("net1", "net2")
    for name in names:
        shared.add(shared.ipoib, worker, ifname=name)
    first = {name: fabric_beside(worker.name, name) for name in names}
    assert sorted(first["net1"] + first["net2"]) == uverbs_numbers(worker)
    for name in names:
        shared.delete(shared.ipoib, worker, ifname=name)
    for name in reversed(names):
        shared.add(shared.ipoib, worker, ifname=name)
    assert {name: fabric_beside(worker.name, name) for name in names} == first
    for name in names:
        shared.delete(shared.ipoib, worker, ifname=name)


def test_the_containers_files_have_the_pkey_of_their_pod(shared: PoolNode) -> None:
    """By value, and by the index in the table of the guest's ports: 0xffff, 0x8001, …"""
    worker, other = (shared.admit(name, HCA, 2) for name in NAMES)
    nccl, ucx = (_configured(shared, worker, name) for name in ("nccl.conf", "ucx.conf"))
    devices = "ibloop0", "ibloop1"
    assert nccl() == [f"NCCL_IB_HCA=={','.join(devices)}"]
    shared.add(shared.ipoib, worker, pkey="0x8001")
    in_partition = ["NCCL_IB_PKEY_VALUE=0x8001", "NCCL_IB_PKEY=1"]
    assert nccl()[1:] == in_partition
    assert ucx() == [f"UCX_NET_DEVICES={':1,'.join(devices)}:1", "UCX_IB_PKEY=0x0001"]
    shared.add(shared.ipoib, worker, ifname="net2", pkey="0x8001")
    assert nccl()[1:] == in_partition
    shared.add(shared.ipoib, other, pkey="0x8002")
    assert nccl()[1:] == in_partition
    assert _configured(shared, other, "ucx.conf")()[1:] == ["UCX_IB_PKEY=0x0002"]
    shared.add(shared.ipoib, worker, ifname="net3", pkey="0x8003")
    assert nccl()[1:] == []  # NCCL and UCX know one P_Key for all HCAs
    for ifname, pkey in {"net1": "0x8001", "net2": "0x8001", "net3": "0x8003"}.items():
        shared.delete(shared.ipoib, worker, ifname=ifname, pkey=pkey)
    shared.add(shared.ipoib, worker, pkey="0x8003")
    assert nccl()[1:] == ["NCCL_IB_PKEY_VALUE=0x8003", "NCCL_IB_PKEY=3"]
    shared.delete(shared.ipoib, worker, pkey="0x8003")
    shared.delete(shared.ipoib, other, pkey="0x8002")
    for ended in (worker, other):
        shared.kubelet.remove(ended)
    shared.admit("successor", HCA, 2)
    shared.forget_young_too()
    assert len(list((shared.paths.devices / "jobs").iterdir())) == 1


def _configured(node: PoolNode, worker: Pod, name: str) -> Callable[[], list[str]]:
    """Reads the lines of a file of the pod's container, without the comment."""
    first = min(worker.containers["main"].ids[HCA])
    file = job_config.directory(node.paths, HCA, first) / name
    return lambda: file.read_text().splitlines()[1:]


def test_parent_on_another_hca_is_refused_with_both_names(shared: PoolNode) -> None:
    worker = shared.admit(NAMES[0], HCA)
    parents = {number_of(f"ibloop{n}"): (f"ib{n}", f"ibloop{n}") for n in (0, 1)}
    own = parents.pop(uverbs_numbers(worker)[0])
    ((other, rdma),) = parents.values()
    before = link_names()
    reply = shared.refused(shared.ipoib, worker, master=other)
    assert reply.document["code"] == 120
    for named in (f'"{other}"', rdma, own[1], uverbs_numbers(worker)[0]):
        assert named in reply.text
    assert link_names() == before
    shared.add(shared.ipoib, worker, master=[other, own[0]])
    assert fabric_beside(worker.name) == uverbs_numbers(worker)
    shared.delete(shared.ipoib, worker, master=own[0])
    reply = shared.refused(shared.ipoib, worker, master=other, match_device=False)
    assert (reply.document["code"], '"set.match_device"' in reply.text) == (121, True)
    shared.ipoib.policy = rules.of({"set": {"match_device": [False]}}, "config.yaml")
    shared.add(shared.ipoib, worker, master=other, match_device=False)
    assert fabric_beside(worker.name) == [number_of(rdma)]
    shared.ipoib.policy = Policy()
    shared.delete(shared.ipoib, worker, master=other)


def test_port_that_goes_down_is_unhealthy_within_two_seconds_and_comes_back(
    shared: PoolNode,
) -> None:
    """One of three tries must succeed, since the machine may be busy."""
    assert any(_seconds_until_down(shared) <= HEALTH_SECONDS for _ in range(3))


def _seconds_until_down(shared: PoolNode) -> float:
    """Take a port down and up again; returns the seconds until its devices were unhealthy."""
    try:
        started = time.monotonic()
        knob(0, "port").write_text("down")
        shared.await_healthy(HCA, 4)
        down = time.monotonic() - started
        assert {device_id for device_id, healthy in shared.listed(HCA).items() if healthy} == {
            f"ibloop1-{slot}" for slot in range(4)
        }
    finally:
        knob(0, "port").write_text("up")
    started = time.monotonic()
    shared.await_healthy(HCA, 8)
    print(f"down told after {down:.2f} s, up after {time.monotonic() - started:.2f} s")  # noqa: T201
    igb.await_carrier("ib0")
    return down


def test_replugged_hcas_with_other_numbers(shared: PoolNode) -> None:
    """The module is reloaded after a Soft-RoCE device has taken the first number."""
    old = shared.admit(NAMES[0], HCA)
    held = shared.held()[0][1]
    hca = held.rpartition("-")[0]
    (number,) = uverbs_numbers(old)
    pf = cards.cards()[0].pf
    subprocess.run(["/sbin/modprobe", "rdma_rxe"], check=True)
    try:
        with igb.ibloop_unloaded():
            away = {f"{hca}-{slot}": False for slot in range(4)}
            shared.kubelet.wait(lambda: shared.listed(HCA) == away)
            run(RDMA, "link", "add", "rxe9", "type", "rxe", "netdev", pf)
        assert number_of("rxe9") == "231:192"
        # All devices except the one whose holder has the old number.
        shared.await_healthy(HCA, 7)
        assert [device_id for device_id, healthy in shared.listed(HCA).items() if not healthy] == [
            held
        ]
        new = shared.admit(NAMES[1], HCA)
        assert set(uverbs_numbers(new)) <= {number_of(f"ibloop{n}") for n in (0, 1)}
        shared.add(shared.ipoib, new)
        assert fabric_beside(new.name) == uverbs_numbers(new)
        shared.delete(shared.ipoib, new)
        reply = shared.refused(shared.ipoib, old)
        assert reply.document["code"] == 120
        got = f"got RDMA device {hca}, "
        for named in (got, f" {number}, but HCA {hca} has ", f" {number_of(hca)} now"):
            assert named in reply.text
    finally:
        subprocess.run([RDMA, "link", "delete", "rxe9"], check=False)
        with igb.ibloop_unloaded():
            pass


def test_drivers_are_reloaded_under_fifty_pods() -> None:
    """Their interfaces vanish with the driver. The device plugin runs on, and every DEL
    succeeds."""
    names = [f"pod{number}" for number in range(50)]
    slots = 32
    with (
        pool_node(PoolConfig(resource=HCA, slots=slots)) as node,
        ExitStack() as namespaces,
    ):
        node.await_healthy(HCA, 2 * slots)
        pods = []
        for name in names:
            namespaces.enter_context(pod(name))
            pods.append(node.admit(name, HCA))
            node.add(node.ipoib, pods[-1], ipam=RANGE)
        with igb.ibloop_unloaded():
            started = time.monotonic()
            node.kubelet.wait(lambda: node.kubelet.allocatable(HCA) == 0)
            gone = time.monotonic() - started
            assert all(link_names(name) == {"lo"} for name in names)
        started = time.monotonic()
        node.await_healthy(HCA, 2 * slots)
        print(f"gone told after {gone:.2f} s, back after {time.monotonic() - started:.2f} s")  # noqa: T201
        for worker in pods:
            node.delete(node.ipoib, worker, ipam=RANGE)
        assert node.ipoib.leftovers() == []
        after = node.admit("after", HCA)
        namespaces.enter_context(pod("after"))
        node.add(node.ipoib, after, ipam=RANGE)
        assert fabric_beside("after") == uverbs_numbers(after)
        node.delete(node.ipoib, after, ipam=RANGE)


def test_vfs_are_those_of_the_pods_verbs_devices(netns: None, vfs: Card) -> None:
    selector = Selector(pciAddresses=vfs.vfs)
    with pool_node(PoolConfig(resource=VF, mode="exclusive", selectors=(selector,))) as node:
        node.await_healthy(VF, 2)
        assert set(node.listed(VF)) == set(vfs.vfs[:2])  # the third has no RDMA device
        before = cards.snapshot()
        pods = [node.admit(name, VF) for name in NAMES]
        for worker, interface in zip(pods, attached(node, pods), strict=True):
            assert beside(worker.name) == uverbs_numbers(worker)
            assert [interface["pciID"]] == worker.containers["main"].ids[VF]
            assert number_of(interface["rdmaDevice"]) == uverbs_numbers(worker)[0]
        for worker in pods:
            node.delete(node.sriov, worker)
        assert cards.snapshot() == before

        refused_to_a_pod_without_an_hca(node, vfs)
        assert cards.snapshot() == before

        # Multus passes the device. A device of another pod is refused.
        ids = [worker.containers["main"].ids[VF][0] for worker in pods]
        reply = node.refused(node.sriov, pods[0], deviceID=ids[1])
        assert (reply.document["code"], ids[0] in reply.text, ids[1] in reply.text) == (
            120,
            True,
            True,
        )
        for worker, device_id in zip(pods, ids, strict=True):
            node.add(node.sriov, worker, deviceID=device_id, runtimeConfig={"deviceID": device_id})
            assert beside(worker.name) == uverbs_numbers(worker)
            node.delete(node.sriov, worker, deviceID=device_id)
            node.kubelet.remove(worker)
        assert cards.snapshot() == before
        assert node.sriov.leftovers() == []
        third = node.admit("worker-2", VF)
        node.forget_young_too()
        assert node.held() == [(VF, third.containers["main"].ids[VF][0])]


def refused_to_a_pod_without_an_hca(node: PoolNode, card: Card) -> None:
    """Both VFs of the pool are allocated; the third is free and belongs to no pool."""
    tenant = Pod(name=NAMES[0], namespace="tenant", uid="uid-tenant", requests=[])
    node.sriov.policy = rules.of({"set": {"match_device": [False]}}, "config.yaml")
    for config in ({}, {"match_device": False}):
        for vf in card.vfs[:2]:
            reply = node.refused(node.sriov, tenant, deviceID=vf, **config)
            assert reply.document["code"] in (120, 121)
    node.sriov.policy = Policy()
    reply = node.add(node.sriov, tenant, master=card.pf)
    assert reply.interface["pciID"] == card.vfs[2]
    node.delete(node.sriov, tenant, master=card.pf)


def test_vfs_without_rdma_are_offered_by_both_forms_of_a_pool_in_one_file(
    netns: None, card: Card
) -> None:
    """Each pod gets the VF that the kubelet gave to it; neither has a device node."""
    text = f"""
pools:
  - {{name: example.com/eth, mode: exclusive, rdma: false, selectors: {{pfNames: ["{card.pf}#1"]}}}}
resourceList: [{{resourceName: net, selectors: {{pfNames: ["{card.pf}#2"]}}}}]
"""
    resources = ("example.com/eth", "intel.com/net")
    with pool_node(*formats.parse(text.encode(), "config.yaml").pools) as node:
        before = cards.snapshot()
        for resource, vf in zip(resources, card.vfs[1:3], strict=True):
            node.await_healthy(resource, 1)
            assert list(node.listed(resource)) == [vf]
        pods = [node.admit(*pair) for pair in zip(NAMES, resources, strict=True)]
        assert [interface["pciID"] for interface in attached(node, pods)] == list(card.vfs[1:3])
        assert [uverbs_numbers(worker) for worker in pods] == [[], []]
        for worker in pods:
            node.delete(node.sriov, worker)
        assert cards.snapshot() == before


def test_vfs_without_a_link_are_given_and_their_ports_come_up_later(
    netns: None, fresh_vfs: Card, without_link: None
) -> None:
    """Their PF is on this node, so an ADD brings their links up."""
    selector = Selector(pciAddresses=fresh_vfs.vfs)
    with pool_node(PoolConfig(resource=VF, mode="exclusive", selectors=(selector,))) as node:
        node.await_healthy(VF, 2)
        pods = [node.admit(name, VF) for name in NAMES]
        for worker, interface in zip(pods, attached(node, pods), strict=True):
            assert beside(worker.name) == uverbs_numbers(worker)
            assert number_of(interface["rdmaDevice"]) == uverbs_numbers(worker)[0]
        for number in (0, 1):
            knob(number, "port").write_text("up")
        for worker in pods:
            node.delete(node.sriov, worker)
        assert all(node.listed(VF).values())
        assert node.sriov.leftovers() == []


def test_vfs_without_a_link_are_not_given_to_many(
    netns: None, fresh_vfs: Card, without_link: None
) -> None:
    """They stay on the host, where their links stay down."""
    selector = Selector(pciAddresses=fresh_vfs.vfs)
    with pool_node(PoolConfig(resource=HCA, slots=2, selectors=(selector,))) as node:
        node.kubelet.wait(lambda: len(node.listed(HCA)) == 4)
        assert not any(node.listed(HCA).values())
        for number in (0, 1):
            knob(number, "port").write_text("up")
        node.await_healthy(HCA, 4)


def test_ipoib_children_are_on_the_vfs_of_their_pods(netns: None, vfs: Card) -> None:
    selector = Selector(pciAddresses=vfs.vfs)
    with pool_node(PoolConfig(resource=HCA, slots=2, selectors=(selector,))) as node:
        node.await_healthy(HCA, 4)
        pods = [node.admit(name, HCA) for name in NAMES]
        slots = [worker.containers["main"].ids[HCA][0] for worker in pods]
        for worker, slot in zip(pods, slots, strict=True):
            reply = node.add(node.ipoib, worker, deviceID=slot)
            assert fabric_beside(worker.name) == uverbs_numbers(worker)
            assert reply.interface["pciID"] == slot.rpartition("-")[0]
            node.delete(node.ipoib, worker, deviceID=slot)
        reply = node.refused(node.ipoib, pods[0], deviceID=slots[1])
        assert reply.document["code"] == 120
        assert node.ipoib.leftovers() == []


def test_isolated_vfs_are_those_of_the_pods_verbs_devices(vfs: Card) -> None:
    """In exclusive mode the RDMA device is in the pod, and its device id stays healthy."""
    selector = Selector(pciAddresses=vfs.vfs)
    with (
        igb.exclusive_rdma(),
        pool_node(PoolConfig(resource=VF, mode="exclusive", selectors=(selector,))) as node,
        pod(NAMES[0]),
        pod(NAMES[1]),
    ):
        node.await_healthy(VF, 2)
        pods = [node.admit(name, VF) for name in NAMES]
        add = partial(node.add, node.sriov, rdmaIsolation=True)
        delete = partial(node.delete, node.sriov, rdmaIsolation=True)
        with ThreadPoolExecutor(len(pods)) as pool:
            for _ in range(10):  # each move renumbers the uverbs devices
                list(pool.map(add, pods))
                for worker in pods:
                    assert beside(worker.name) == uverbs_numbers(worker)
                list(pool.map(delete, pods))
        for worker in pods:
            add(worker)
        for worker in pods:
            assert beside(worker.name) == uverbs_numbers(worker)
            shown = run(IP, "netns", "exec", worker.name, RDMA, "dev").splitlines()
            names = [line.split()[1].rstrip(":") for line in shown]
            assert [number_of(name) for name in names] == uverbs_numbers(worker)
        node.plugin.look()
        assert not node.plugin._health.pending
        node.await_healthy(VF, 2)
        node.restart()
        node.kubelet.wait(lambda: node.kubelet.count("Register", VF) == 2)
        node.await_healthy(VF, 2)
        for worker in pods:
            delete(worker)
        assert node.sriov.leftovers() == []
