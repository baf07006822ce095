"""Addresses that a lost machine may still use: the marks of the controller, and the next holder.

No order of mark, deletion, claim and probe, and no crash between them, loses a mark.
"""

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam.addresses import Interval
from ipam.cluster.controller.machines import OUT_OF_SERVICE
from ipam.cluster.controller.probe_marks import MOST, narrowed
from ipam.cluster.controller.reclaim import TAINTED_FOR, free_powered_off
from ipam.cluster.controller.rounds import COUNTS_EVERY
from ipam.cluster.lessee import CONFIRM_EVERY
from ipam.cluster.objects import AddressBlock, AddressPool, StickySpec
from ipam.cluster.upkeep import ANSWERED_AGAIN
from ipam.store import AddressInUse, Grant
from tests.unit.ipam.calls import request
from tests.unit.ipam.cluster.boundaries import Kill, Killed, armed, disarmed
from tests.unit.ipam.cluster.controller.cluster import GONE_AFTER, MARGIN, OFFLINE, Cluster
from tests.unit.ipam.cluster.nodes import ClusterNode

BLOCK = "default.10.64.0.8-29"
RUN = ("10.64.0.8-10.64.0.15",)
WHOLE_WAIT = GONE_AFTER + OFFLINE + MARGIN
IPAM = {"range": "10.64.0.0/28", "exclude": ["10.64.0.0/29"]}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def lost(range_: str = "10.64.0.0/28", **spec: object) -> Cluster:
    """A pool of two blocks, of which a node that is gone had one: it is marked and free."""
    cluster = Cluster()
    cluster.pool(range_, block_size=8, name="10.64.0.0-28", **spec)
    cluster.round()
    cluster.block("10.64.0.8", cluster.node("gpu-1"), pool="10.64.0.0-28")
    cluster.node("gpu-2")
    cluster.round()
    cluster.remove_node("gpu-1")
    return cluster


def marks(cluster: Cluster, name: str = "10.64.0.0-28") -> tuple[str, ...]:
    return cluster.pool_now(name).status.probe


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


# --- marks -----------------------------------------------------------------------------------


def test_a_block_of_a_node_that_vanished_is_marked_before_it_is_free() -> None:
    cluster = lost()
    while BLOCK in cluster.blocks():
        assert marks(cluster) == ()
        cluster.run(1)
    assert marks(cluster) == RUN


def test_a_proof_that_the_machine_is_off_marks_nothing() -> None:
    cluster = Cluster()
    cluster.pool(block_size=8)
    cluster.round()
    cluster.block("10.64.0.8", cluster.node("gpu-1"))
    cluster.round()
    cluster.change_node("gpu-1", ready=False, taints=(OUT_OF_SERVICE,))
    cluster.run(TAINTED_FOR + 3)
    assert cluster.blocks() == {}
    assert marks(cluster, "pool") == ()


def test_an_administrator_who_says_that_it_is_off_marks_nothing() -> None:
    cluster = lost()
    assert free_powered_off(cluster.client, cluster.api.look(AddressBlock, BLOCK))
    cluster.run(WHOLE_WAIT)
    assert (cluster.blocks(), marks(cluster)) == ({}, ())


@pytest.mark.parametrize("failure", ["before", "after"])
@pytest.mark.parametrize("call", range(1, 60))
def test_no_failed_call_of_a_round_frees_an_unmarked_block(call: int, failure: str) -> None:
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
    if BLOCK not in cluster.blocks():
        assert marks(cluster) == RUN
    cluster.new_leader()
    cluster.run(2 * WHOLE_WAIT)
    assert (cluster.blocks(), marks(cluster)) == ({}, RUN)


def test_every_pool_that_overlaps_is_marked_and_so_is_a_new_one() -> None:
    cluster = Cluster()
    cluster.pool("10.64.0.0/24", block_size=8)
    cluster.pool("10.64.0.0/28", block_size=8, name="part")
    cluster.round()
    cluster.block("10.64.0.8", cluster.node("gpu-1"))
    cluster.round()
    cluster.remove_node("gpu-1")
    cluster.run(WHOLE_WAIT + 2)
    assert [marks(cluster, name) for name in ("pool", "part")] == [RUN, RUN]
    cluster.pool("10.64.0.8/30", block_size=4, name="new")
    cluster.pool("10.64.0.0/25", block_size=8, name="half")
    cluster.run(5)
    assert marks(cluster, "half") == RUN
    assert cluster.condition("Ready", "half")[0] == "True"


def test_a_holder_that_answers_the_fence_after_the_mark_keeps_its_block() -> None:
    """It is marked for nothing then: a later holder probes, which does no harm."""
    cluster = lost()
    cluster.run(WHOLE_WAIT - 1)
    update_status = cluster.client.update_status

    def answered_then(changed: AddressPool) -> AddressPool:
        stored = update_status(changed)
        if BLOCK in cluster.blocks() and stored.status.probe:
            cluster.answer(BLOCK)
        return stored

    cluster.client.update_status = answered_then  # type: ignore[method-assign, assignment]
    cluster.run(3)
    cluster.node("gpu-1")
    cluster.client.update_status = update_status  # type: ignore[method-assign]
    cluster.answer(BLOCK)
    cluster.run(WHOLE_WAIT)
    assert (cluster.blocks(), marks(cluster)) == ({BLOCK: "Active"}, RUN)


def test_marks_are_joined_where_there_are_too_many() -> None:
    runs = [Interval(10 * each, 10 * each + 1) for each in range(3 * MOST)]
    runs[7] = Interval(66, 67)  # the smallest gap, to the one before
    joined = narrowed(runs)
    assert len(joined) == MOST
    assert all(any(a.first <= r.first and r.last <= a.last for a in joined) for r in runs)
    assert narrowed(runs[:MOST]) == tuple(runs[:MOST])


# --- the next holder -------------------------------------------------------------------------


def freed(stack: ExitStack, directory: Path) -> tuple[Cluster, ClusterNode]:
    cluster = lost()
    cluster.run(WHOLE_WAIT + 2)
    assert marks(cluster) == RUN
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


def test_other_blocks_are_not_probed(stack: ExitStack, tmp_path: Path) -> None:
    _, node = freed(stack, tmp_path)
    grant = reserve(node, "p1", exclude=["10.64.0.8/29"])
    assert grant.unprobed == ()


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
    assert cluster.api.look(AddressBlock, BLOCK).status.answered == ("10.64.0.8",)
    assert (node.lessee.counted().unprobed, node.lessee.counted().answered) == (6, 1)
    events = [each for each in cluster.api.events if each.reason == "AddressInUse"]
    assert len(events) == 1
    with pytest.raises(CNIError) as taken:
        reserve(node, "p2", addresses=[{"address": "10.64.0.8/28"}])
    assert taken.value.code == Code.ADDRESS_TAKEN


def test_it_is_probed_again_after_an_hour(stack: ExitStack, tmp_path: Path) -> None:
    _, node = freed(stack, tmp_path)
    grant = reserve(node, "p1")
    with pytest.raises(AddressInUse):
        settle(node, "p1", grant, {"10.64.0.8": "02:00:00:00:00:02"})
    node.plugin.undo(grant)
    node.steps(2, ANSWERED_AGAIN / 2 + 10)
    again = reserve(node, "p1")
    assert again.unprobed == addresses(again) == ("10.64.0.8",)


def test_the_mark_goes_with_what_was_probed(stack: ExitStack, tmp_path: Path) -> None:
    cluster, node = freed(stack, tmp_path)
    for number in range(3):
        settle(node, f"p{number}", reserve(node, f"p{number}"))
    node.steps(3)
    cluster.run(2 * COUNTS_EVERY)
    assert marks(cluster) == ("10.64.0.11-10.64.0.15",)


def test_what_was_not_probed_stays_marked_for_the_holder_after_the_next(
    stack: ExitStack, tmp_path: Path
) -> None:
    cluster, node = freed(stack, tmp_path)
    settle(node, "p1", reserve(node, "p1"))
    node.steps(3)
    cluster.run(2 * COUNTS_EVERY)
    node.delete("p1")
    node.lessee.leaving = True
    node.steps(5)
    assert cluster.blocks() == {}
    third = next_node(cluster, tmp_path, stack, "gpu-3")
    grant = reserve(third, "p2")
    assert (addresses(grant), grant.unprobed) == (("10.64.0.8",), ())
    assert reserve(third, "p3").unprobed == ("10.64.0.9",)


def test_a_node_that_knows_an_older_pool_sees_the_mark(stack: ExitStack, tmp_path: Path) -> None:
    cluster = lost()
    node = next_node(cluster, tmp_path, stack)
    node.add("p0", {"range": "10.64.0.0/28", "exclude": ["10.64.0.8/29"]})  # it knows the pool
    cluster.run(WHOLE_WAIT + 2)
    assert marks(cluster) == RUN
    assert node.lessee._pools.known("10.64.0.0-28").status.probe == ()  # type: ignore[union-attr]
    assert reserve(node, "p1").unprobed == ("10.64.0.8",)
    assert cluster.api.look(AddressBlock, BLOCK).spec.probe


def test_a_node_that_died_after_its_claim_sees_the_mark(stack: ExitStack, tmp_path: Path) -> None:
    cluster, node = freed(stack, tmp_path)

    def killed(row: object) -> None:
        raise KeyboardInterrupt

    node.lessee._store.put = killed  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        reserve(node, "p1")
    assert (node.rows(), list(cluster.blocks())) == ({}, [BLOCK])
    node.restart()
    node.steps(2)
    assert list(node.rows()) == [BLOCK]
    assert reserve(node, "p1").unprobed == ("10.64.0.8",)


def test_a_controller_that_knows_no_marks_takes_no_probe_from_a_node(
    stack: ExitStack, tmp_path: Path
) -> None:
    """An older one writes the status without them: what was leased is probed all the same."""
    cluster, node = freed(stack, tmp_path)
    reserve(node, "p1")
    pool = cluster.pool_now("10.64.0.0-28")
    cluster.api.put(replace(pool, status=replace(pool.status, probe=())))
    node.steps(3, 200)
    assert reserve(node, "p2").unprobed == ("10.64.0.9",)


def test_a_block_of_an_older_agent_clears_no_mark(stack: ExitStack, tmp_path: Path) -> None:
    cluster, _ = freed(stack, tmp_path)
    cluster.block("10.64.0.8", cluster.node("gpu-9"), pool="10.64.0.0-28")
    cluster.run(20)
    assert marks(cluster) == RUN


def test_pods_of_plugins_that_cannot_probe_get_the_address_and_an_event(
    stack: ExitStack, tmp_path: Path
) -> None:
    cluster, node = freed(stack, tmp_path)
    assert node.add("p1", IPAM) == ["10.64.0.8"]
    node.steps(2)
    assert [each.reason for each in cluster.api.events] == ["AddressNotProbed"]


def test_ipv6_is_marked_and_probed(stack: ExitStack, tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.pool("fd00:64::/124", block_size=16, name="fd00-64--0-124")
    cluster.round()
    cluster.block("fd00:64::", cluster.node("gpu-1"), prefix=124, pool="fd00-64--0-124")
    cluster.round()
    cluster.remove_node("gpu-1")
    cluster.run(WHOLE_WAIT + 2)
    assert marks(cluster, "fd00-64--0-124") == ("fd00:64::-fd00:64::f",)
    node = next_node(cluster, tmp_path, stack)
    asked = request("ADD", {"range": "fd00:64::/124"}, "p1-1", pod="p1")
    assert node.plugin.reserve(asked)[1].unprobed == ("fd00:64::1",)


def test_a_sticky_block_says_itself_that_it_is_to_be_probed() -> None:
    cluster = lost()
    found = cluster.api.look(AddressBlock, BLOCK)
    cluster.api.delete(found)
    sticky = StickySpec(reservation="a/r", pod="p", ifname="net1", address="10.64.0.9")
    new = replace(found, spec=replace(found.spec, sticky=sticky))
    cluster.api.create(replace(new, metadata=replace(new.metadata, uid="", resource_version="")))
    cluster.run(WHOLE_WAIT + 1)
    assert marks(cluster) == RUN
    left = list(cluster.api.look_at_all(AddressBlock).items)
    assert all(each.spec.probe for each in left)


# --- crashes of the next holder, and other ways to begin to use a block ------------------------


@pytest.mark.parametrize("at", range(1, 21))
def test_a_kill_at_any_boundary_of_the_claim_loses_no_mark(
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


def test_a_kill_between_reservation_and_result_leaves_the_address_to_be_probed(
    stack: ExitStack, tmp_path: Path
) -> None:
    _, node = freed(stack, tmp_path)
    first = reserve(node, "p1")
    node.restart()
    node.delete("p1")
    again = reserve(node, "p2")
    assert addresses(again) == again.unprobed == addresses(first)


def test_a_block_that_pods_hold_and_that_is_leased_again_is_probed(
    stack: ExitStack, tmp_path: Path
) -> None:
    """Its node came back after the wait, and another one may have had the block meanwhile."""
    cluster, node = freed(stack, tmp_path)
    for number in range(7):
        settle(node, f"p{number}", reserve(node, f"p{number}"))
    node.steps(3)
    cluster.run(2 * COUNTS_EVERY)
    assert marks(cluster) == ("10.64.0.15",)  # which no pod can have
    cluster.api.delete(cluster.api.look(AddressBlock, BLOCK))
    pool = cluster.pool_now("10.64.0.0-28")
    cluster.api.put(replace(pool, status=replace(pool.status, probe=("10.64.0.12-10.64.0.13",))))
    node.steps(2, CONFIRM_EVERY)
    assert list(cluster.blocks()) == [BLOCK]
    for number in range(7):
        node.delete(f"p{number}")
    unprobed = [grant.unprobed for grant in (reserve(node, f"q{each}") for each in range(7))]
    assert [each for (each,) in filter(None, unprobed)] == ["10.64.0.12", "10.64.0.13"]
