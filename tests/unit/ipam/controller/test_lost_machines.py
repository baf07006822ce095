"""Addresses that a lost machine may still use: its blocks are let go, and the next holder probes.

No order of these steps, and no crash between them, has an address used without a probe.
"""

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from cni.spec.result import Result
from ipam.controller.death_proofs import OUT_OF_SERVICE
from ipam.controller.reclaim import TAINTED_FOR, free_powered_off
from ipam.leases.lessee import CONFIRM_EVERY
from ipam.leases.objects import AddressBlock, StickySpec
from ipam.plugin import IpamExecutable
from ipam.store.reservations import AddressInUse, Grant
from tests.unit.ipam.calls import error_of, request
from tests.unit.ipam.controller.cluster import GONE_AFTER, MARGIN, OFFLINE, Cluster
from tests.unit.ipam.leases.boundaries import Kill, Killed, armed, disarmed
from tests.unit.ipam.leases.nodes import ClusterNode

BLOCK = "default.10.64.0.8-29"
WHOLE_WAIT = GONE_AFTER + OFFLINE + MARGIN
IPAM = {"range": "10.64.0.0/28", "exclude": ["10.64.0.0/29"]}


def lost(range_: str = "10.64.0.0/28", **spec: object) -> Cluster:
    """A pool of two blocks, of which a node that is gone had one."""
    cluster, name = Cluster(), range_.replace("/", "-")
    cluster.pool(range_, block_size=8, name=name, **spec)
    cluster.round()
    cluster.block("10.64.0.8", cluster.node("gpu-1"), pool=name)
    cluster.node("gpu-2")
    cluster.round()
    cluster.remove_node("gpu-1")
    return cluster


def is_let_go(cluster: Cluster) -> bool:
    """Whether any node may take the block over, and is to probe its addresses."""
    spec = cluster.api.look(AddressBlock, BLOCK).spec
    assert spec.probe == (spec.state == "Draining")
    return spec.probe


def next_node(
    cluster: Cluster, directory: Path, stack: ExitStack, name: str = "gpu-2"
) -> ClusterNode:
    node = ClusterNode(cluster.api, directory / name, name, clock=cluster.clock, kept=True)
    stack.callback(node.close)
    return node


def reserve(node: ClusterNode, pod: str, **ipam: object) -> Grant:
    """The grant of an ADD by a plugin that probes."""
    return node.plugin.reserve(request("ADD", {**IPAM, **ipam}, f"{pod}-1", pod=pod))[1]


def settle(
    node: ClusterNode, pod: str, grant: Grant, answers: dict[str, str] | None = None
) -> None:
    asked = request("ADD", IPAM, f"{pod}-1", pod=pod)
    node.plugin.settle_probes(asked, grant, answers or {})


def addresses(grant: Grant) -> tuple[str, ...]:
    return tuple(each.reservation.address for each in grant.granted)


# --- the controller --------------------------------------------------------------------------


def test_the_block_of_a_node_that_vanished_is_let_go_to_be_probed() -> None:
    cluster = lost()
    cluster.run(WHOLE_WAIT - 1)
    assert not is_let_go(cluster)
    cluster.run(3)
    assert is_let_go(cluster)
    assert cluster.condition("Exhausted", "10.64.0.0-28")[0] == "False"


def test_with_a_proof_that_the_machine_is_off_nothing_is_to_be_probed() -> None:
    cluster = Cluster()
    cluster.pool(block_size=8)
    cluster.round()
    cluster.block("10.64.0.8", cluster.node("gpu-1"))
    cluster.round()
    cluster.change_node("gpu-1", ready=False, taints=(OUT_OF_SERVICE,))
    cluster.run(TAINTED_FOR + 3)
    assert not cluster.api.look_at_all(AddressBlock).items


def test_with_an_administrator_s_word_that_it_is_off_nothing_is_to_be_probed() -> None:
    cluster = lost()
    assert free_powered_off(cluster.client, cluster.api.look(AddressBlock, BLOCK))
    assert not cluster.api.look_at_all(AddressBlock).items


@pytest.mark.parametrize("failure", ["before", "after"])
@pytest.mark.parametrize("call", range(1, 60))
def test_no_failed_call_of_a_round_frees_the_block_without_a_probe(call: int, failure: str) -> None:
    """Each call of the last rounds fails once, with or without its effect, and another leads."""
    cluster = lost()
    cluster.run(WHOLE_WAIT - 1)
    assert cluster.blocks() == {BLOCK: "Reclaiming"}
    count = 0
    original = cluster.client._call

    def faulty(*arguments: Any, **named: Any) -> object:  # noqa: ANN401
        nonlocal count
        count += 1
        if count == call and failure == "before":
            raise RuntimeError
        answer = original(*arguments, **named)
        if count == call:
            raise RuntimeError
        return answer

    cluster.client._call = faulty  # type: ignore[method-assign, assignment]
    with suppress(RuntimeError):
        cluster.run(4)
    cluster.client._call = original  # type: ignore[method-assign]
    is_let_go(cluster)
    cluster.new_leader()
    cluster.run(2 * WHOLE_WAIT)
    assert is_let_go(cluster)


# --- the next holder -------------------------------------------------------------------------


def freed(stack: ExitStack, directory: Path) -> tuple[Cluster, ClusterNode]:
    cluster = lost()
    cluster.run(WHOLE_WAIT + 2)
    assert is_let_go(cluster)
    return cluster, next_node(cluster, directory, stack)


def test_the_next_holder_probes_each_address_once(stack: ExitStack, tmp_path: Path) -> None:
    cluster, node = freed(stack, tmp_path)
    first = reserve(node, "p1")
    assert first.unprobed == addresses(first) == ("10.64.0.8",)
    assert cluster.api.look(AddressBlock, BLOCK).spec.probe
    settle(node, "p1", first)
    node.delete("p1")
    assert addresses(again := reserve(node, "p2")) == ("10.64.0.8",)
    assert again.unprobed == ()
    assert reserve(node, "p3").unprobed == ("10.64.0.9",)


def test_a_block_that_is_free_is_leased_first(stack: ExitStack, tmp_path: Path) -> None:
    _, node = freed(stack, tmp_path)
    grants = [reserve(node, f"p{each}", exclude=[]) for each in range(8)]
    assert [grant.unprobed for grant in grants] == [()] * 7 + [("10.64.0.8",)]


def test_an_address_that_was_not_probed_is_probed_by_the_next_who_gets_it(
    stack: ExitStack, tmp_path: Path
) -> None:
    """The ADD died after the reservation, or its plugin cannot probe."""
    _, node = freed(stack, tmp_path)
    node.add("p1", IPAM)
    node.delete("p1")
    node.restart()
    assert reserve(node, "p2").unprobed == ("10.64.0.8",)


def test_an_address_that_another_machine_has_is_kept_from_pods(
    stack: ExitStack, tmp_path: Path
) -> None:
    cluster, node = freed(stack, tmp_path)
    grant = reserve(node, "p1")
    with pytest.raises(AddressInUse, match=r"10\.64\.0\.8 \(02:00:00:00:00:02\)") as raised:
        settle(node, "p1", grant, {"10.64.0.8": "02:00:00:00:00:02"})
    assert raised.value.code == Code.TRY_AGAIN
    node.plugin.undo(grant)
    second = reserve(node, "p1")
    assert addresses(second) == ("10.64.0.9",)
    settle(node, "p1", second)
    node.steps(3)
    assert (node.lessee.counted().unprobed, node.lessee.counted().answered) == (6, 1)
    events = [each for each in cluster.api.events if each.reason == "AddressInUse"]
    assert len(events) == 1
    with pytest.raises(CNIError) as taken:
        reserve(node, "p2", addresses=[{"address": "10.64.0.8/28"}])
    assert taken.value.code == Code.ADDRESS_TAKEN


def test_a_block_whose_addresses_are_all_proved_free_is_given_back_as_any_other(
    stack: ExitStack, tmp_path: Path
) -> None:
    cluster = lost("10.64.0.0/27")
    cluster.run(WHOLE_WAIT + 2)
    node = next_node(cluster, tmp_path, stack)
    ipam = {"range": "10.64.0.0/27", "exclude": ["10.64.0.0/29", "10.64.0.16/28"]}
    pods = [f"p{number}" for number in range(8)]
    for pod in pods:
        asked = request("ADD", ipam, f"{pod}-1", pod=pod)
        _, grant = node.plugin.reserve(asked)
        assert len(grant.unprobed) == 1
        node.plugin.settle_probes(asked, grant, {})
    for pod in pods:
        node.delete(pod)
    node.lessee.leaving = True
    node.steps(5)
    assert not cluster.api.look_at_all(AddressBlock).items


def test_a_block_that_was_not_probed_as_a_whole_is_let_go_for_the_holder_after_the_next(
    stack: ExitStack, tmp_path: Path
) -> None:
    cluster, node = freed(stack, tmp_path)
    settle(node, "p1", reserve(node, "p1"))
    node.delete("p1")
    node.lessee.leaving = True
    node.steps(5)
    assert is_let_go(cluster)
    third = next_node(cluster, tmp_path, stack, "gpu-3")
    assert reserve(third, "p2").unprobed == ("10.64.0.8",)


def test_of_two_nodes_that_take_it_over_one_has_it(stack: ExitStack, tmp_path: Path) -> None:
    cluster, node = freed(stack, tmp_path)
    other = next_node(cluster, tmp_path, stack, "gpu-3")
    update = other.api.update

    def late(changed: AddressBlock) -> AddressBlock:
        reserve(node, "p1")
        other.api.update = update  # type: ignore[method-assign]
        return update(changed)

    other.api.update = late  # type: ignore[method-assign, assignment]
    assert error_of(lambda: reserve(other, "p2")).code == Code.NO_FREE_ADDRESS
    assert list(node.rows()) == [BLOCK]
    assert other.rows() == {}


def test_a_lost_node_that_comes_back_has_its_block_unless_another_one_took_it(
    stack: ExitStack, tmp_path: Path
) -> None:
    cluster, node = freed(stack, tmp_path)
    reserve(node, "p1")
    node.steps(2)
    cluster.remove_node("gpu-2")
    cluster.run(WHOLE_WAIT + 3)
    assert is_let_go(cluster)
    cluster.node("gpu-2", machine=node.machine)
    node.steps(2, CONFIRM_EVERY)
    assert cluster.blocks() == {BLOCK: "Active"}
    cluster.remove_node("gpu-2")
    cluster.run(WHOLE_WAIT + 3)
    third = next_node(cluster, tmp_path, stack, "gpu-3")
    assert reserve(third, "q1").unprobed == ("10.64.0.8",)
    cluster.node("gpu-2", machine=node.machine)
    node.steps(2, CONFIRM_EVERY)
    assert node.rows() == {BLOCK: "lost"}
    assert cluster.api.look(AddressBlock, BLOCK).holder.node == "gpu-3"


def test_pods_of_plugins_that_cannot_probe_get_the_address_and_an_event(
    stack: ExitStack, tmp_path: Path
) -> None:
    cluster, node = freed(stack, tmp_path)
    executable = IpamExecutable(node.plugin, tmp_path / "lock")
    result = executable.add(request("ADD", IPAM, "p1-1", pod="p1"))
    assert isinstance(result, Result)
    assert [ip.address for ip in result.ips] == ["10.64.0.8/28"]
    node.steps(2)
    assert [each.reason for each in cluster.api.events] == ["AddressNotProbed"]


def test_a_sticky_block_is_let_go_to_be_probed() -> None:
    cluster = lost()
    found = cluster.api.look(AddressBlock, BLOCK)
    cluster.api.delete(found)
    sticky = StickySpec(reservation="a/r", pod="p", ifname="net1", address="10.64.0.9")
    new = replace(found, spec=replace(found.spec, sticky=sticky))
    cluster.api.create(replace(new, metadata=replace(new.metadata, uid="", resource_version="")))
    cluster.run(WHOLE_WAIT + 1)
    assert is_let_go(cluster)


# --- crashes of the next holder, and other ways to begin to use a block ------------------------


@pytest.mark.parametrize("at", range(1, 21))
def test_a_kill_at_any_boundary_of_the_claim_loses_no_probe(
    stack: ExitStack, tmp_path: Path, at: int
) -> None:
    _, node = freed(stack, tmp_path)
    armed(node, Kill(at))
    with suppress(Killed):
        reserve(node, "p1")
    disarmed(node, "boot-1")
    node.steps(3)
    for number in range(2, 5):
        grant = reserve(node, f"p{number}")
        assert grant.unprobed == addresses(grant)
