"""What a follower of nv-ipam's pools does where shares or pools are not as it left them."""

import os
import threading
from pathlib import Path

import pytest

from cni.spec.errors import CNIError, Code
from ipam.cluster.nv_ipam import follower
from ipam.cluster.nv_ipam.objects import NvIPPool
from ipam.cluster.nv_ipam.shares import share_name
from ipam.cluster.objects import AddressShare, Meta, ShareSpec
from ipam.nv_ipam.pools import NodePool, NodePools, PoolsFile
from tests.fake_api import FakeApi, Fault
from tests.unit.ipam.cluster.nv_ipam.nodes import (
    NAMESPACE,
    FollowingNode,
    put_ippool,
    share_of,
)

ENTRY = {"a": ("10.0.0.1", "10.0.0.10"), "b": ("10.0.0.11", "10.0.0.20")}


@pytest.fixture
def server() -> FakeApi:
    return FakeApi()


@pytest.fixture
def a(server: FakeApi, memory_path: Path) -> FollowingNode:
    return FollowingNode(server, memory_path, "a")


def test_a_share_that_somebody_deleted_is_written_again(server: FakeApi, a: FollowingNode) -> None:
    put_ippool(server, ENTRY)
    a.step()
    a.add("p0")
    server.remove(AddressShare, share_of(server, "a").metadata.name)
    a.step(400.0)
    assert share_of(server, "a").spec.ranges == ("10.0.0.1-10.0.0.10",)


def test_what_another_node_took_while_the_share_was_gone_is_left_alone(
    server: FakeApi, memory_path: Path, a: FollowingNode
) -> None:
    put_ippool(server, ENTRY)
    a.step()
    server.remove(AddressShare, share_of(server, "a").metadata.name)
    b = FollowingNode(server, memory_path, "b")
    put_ippool(server, {"b": ENTRY["a"]})
    b.step()
    b.add("q0")
    put_ippool(server, ENTRY)
    b.step()
    a.step(400.0)
    assert a.add("p0") == ["10.0.0.2/24"]


def test_shares_of_two_pools_never_have_one_name() -> None:
    names = {
        share_name("ippool/rail", "1.node", "store"),
        share_name("ippool/rail.1", "node", "store"),
        share_name("ippool/" + "r" * 250, "1.node", "store"),
        share_name("ippool/" + "r" * 250 + ".1", "node", "store"),
        share_name("ippool/rail", "node", "store"),
        share_name("ippool/rail", "node", "other"),
    }
    assert len(names) == 6
    assert all(len(name) <= 253 for name in names)


def test_a_share_that_cannot_be_read_stops_its_pool_only(server: FakeApi, a: FollowingNode) -> None:
    put_ippool(server, {"a": ("10.1.0.1", "10.1.0.9")}, "10.1.0.0/24", "first")
    put_ippool(server, ENTRY, name="pool")
    server.put(
        AddressShare(
            metadata=Meta(name="bad"),
            spec=ShareSpec(pool="ippool/first", node="b", ranges=("10.0.0.9-10.0.0.2",)),
        )
    )
    a.step()
    assert a.add("p0") == ["10.0.0.1/24"]
    with pytest.raises(CNIError, match="AddressShare bad of node b") as caught:
        a.add("p1", {"poolName": "first"})
    assert caught.value.code == Code.TRY_AGAIN


def test_the_share_of_a_deleted_pool_goes_when_its_pods_have_gone(
    server: FakeApi, a: FollowingNode
) -> None:
    put_ippool(server, ENTRY)
    a.step()
    a.add("p0")
    server.remove(NvIPPool, "pool", NAMESPACE)
    a.step()
    assert share_of(server, "a").spec.ranges == ("10.0.0.1",)
    assert a.follower.states["ippool/pool"].outside == 1
    a.step()
    assert a.follower.states["ippool/pool"].outside == 1
    a.delete("p0")
    a.step()
    assert share_of(server, "a") is None
    a.step()
    assert not a.follower.states


def test_the_share_of_a_deleted_pool_goes_even_if_the_agent_restarts_before(
    server: FakeApi, a: FollowingNode
) -> None:
    put_ippool(server, ENTRY)
    a.step()
    a.add("p0")
    server.remove(NvIPPool, "pool", NAMESPACE)
    a.step()
    a.restart()
    a.delete("p0")
    a.step()
    assert share_of(server, "a") is None


def test_a_condition_names_few_of_many_nodes(server: FakeApi, a: FollowingNode) -> None:
    put_ippool(server, {"a": ("10.0.0.1", "10.0.0.254")})
    for index in range(1, 201):
        name = f"{'n' * 200}{index}"
        spec = ShareSpec(pool="ippool/pool", node=name, ranges=(f"10.0.0.{index}",))
        server.put(AddressShare(metadata=Meta(name=f"share{index}"), spec=spec))
    a.step()
    (blocked,) = (each for each in share_of(server, "a").status.conditions if each.message)
    assert len(blocked.message) < 4096
    assert "200 nodes" in blocked.message


def test_a_reader_in_the_writers_process_sees_what_was_written_last(tmp_path: Path) -> None:
    """Also in a file with the inode, the size and the time of an earlier one."""
    file = PoolsFile(tmp_path)

    def write(usable: str) -> None:
        pool = NodePool(key="ippool/p", network="10.0.0.0/24", usable=(usable,))
        file.write(NodePools(node="a", pools={"ippool/p": pool}))
        os.utime(file.path, ns=(1, 1))

    inodes: dict[int, str] = {}
    for number in range(10, 40):
        usable = f"10.0.0.{number}"
        write(usable)
        known = file.read()
        assert known is not None
        inode = os.stat(file.path).st_ino  # noqa: PTH116
        assert known.pools["ippool/p"].usable == (usable,), inodes.get(inode)
        inodes[inode] = usable


def test_a_requested_address_does_not_wait_for_ever_behind_a_server_that_hangs(
    server: FakeApi, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "ASK_WAIT", 0.01)
    put_ippool(server, ENTRY)
    hangs, entered = threading.Event(), threading.Event()

    def faults(verb: str, kind: str, name: str) -> Fault | None:
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            hangs.wait(60.0)
        return None

    a = FollowingNode(server, memory_path, "a", faults=faults)
    a.step()
    put_ippool(server, {"a": ("10.0.0.1", "10.0.0.12")})
    stuck = threading.Thread(target=a.step)
    stuck.start()
    try:
        assert entered.wait(60.0)
        with pytest.raises(CNIError, match="wait for the API server") as caught:
            a.add("p0", config={"args": {"cni": {"ips": ["10.0.0.200"]}}})
        assert caught.value.code == Code.TRY_AGAIN
        assert a.add("p1") == ["10.0.0.1/24"]
    finally:
        hangs.set()
        stuck.join(60.0)


@pytest.mark.parametrize("address", ["10.0.0.0", "10.0.0.255"])
def test_no_pod_gets_the_subnets_own_address_or_its_broadcast(
    server: FakeApi, a: FollowingNode, address: str
) -> None:
    put_ippool(server, ENTRY)
    a.step()
    with pytest.raises(CNIError, match="is not an address of a host") as caught:
        a.add("p0", config={"args": {"cni": {"ips": [address]}}})
    assert caught.value.code == Code.INVALID_CONFIG
    assert share_of(server, "a").spec.ranges == ("10.0.0.1-10.0.0.10",)


def test_a_deletion_that_comes_late_takes_no_share_that_is_used_again(
    server: FakeApi, memory_path: Path
) -> None:
    late = False
    a = FollowingNode(
        server,
        memory_path,
        "a",
        faults=lambda verb, kind, name: Fault.LATE if late and verb == "delete" else None,
    )
    put_ippool(server, ENTRY)
    a.step()
    put_ippool(server, {"b": ENTRY["b"]})
    late = True
    a.step()
    late = False
    put_ippool(server, ENTRY)
    a.step(100.0)
    assert a.add("p0") == ["10.0.0.1/24"]
    server.deliver()
    assert share_of(server, "a") is not None
