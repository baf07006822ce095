"""Pools from definitions, how they are cut into blocks, and their statuses."""

from typing import Any

import pytest
from msgspec.structs import replace

from ipam.addresses import Network, parse_interface
from ipam.controller import definitions, warnings
from ipam.controller.block_sizes import automatic_size
from ipam.controller.definitions import UNUSED_FOR
from ipam.controller.rounds import COUNTS_EVERY, USED_EVERY
from ipam.leases import block_layout
from ipam.leases.block_layout import space_name
from ipam.leases.objects import AddressBlock, AddressPool, StickySpec
from tests.fake_api import Fault, definition
from tests.unit.ipam.controller.cluster import GONE_AFTER, MARGIN, OFFLINE, Cluster


def _pools(cluster: Cluster) -> dict[str, str]:
    """The ranges of all pools by name."""
    return {
        pool.metadata.name: pool.spec.range for pool in cluster.api.look_at_all(AddressPool).items
    }


@pytest.mark.parametrize(
    ("ipam", "pools"),
    [
        ({"range": "10.0.0.7/24"}, {"10.0.0.0-24": "10.0.0.0/24"}),
        (
            {"range": "10.0.0.5-10.0.0.9/24", "exclude": ["10.0.0.6"]},
            {"10.0.0.0-24": "10.0.0.0/24"},
        ),
        (
            {"range": "10.0.0.0/24", "ipRanges": [{"range": "fd00::/64"}]},
            {"10.0.0.0-24": "10.0.0.0/24", "fd00--0-64": "fd00::/64"},
        ),
        ({"range": "10.0.0.0/24", "network_name": "blue"}, {"blue-10.0.0.0-24": "10.0.0.0/24"}),
        (
            {"range": "10.0.0.0/24", "enable_overlapping_ranges": False},
            {"10.0.0.0-24-private": "10.0.0.0/24"},
        ),
        ({"ranges": [[{"subnet": "10.1.0.0/16"}]]}, {"10.1.0.0-16": "10.1.0.0/16"}),
        ({"range": "10.0.0.0/24", "scope": "cluster"}, {"10.0.0.0-24": "10.0.0.0/24"}),
        ({"range": "10.0.0.0/24", "scope": "node"}, {}),
        (
            {"rails": [{"range": "10.0.0.0/24"}, {"range": "10.1.0.0/24"}], "sticky": True},
            {"10.0.0.0-24": "10.0.0.0/24", "10.1.0.0-24": "10.1.0.0/24"},
        ),
    ],
)
@pytest.mark.parametrize("type_", ["whereabouts", "podfabric-ipam"])
def test_a_definition_gets_a_pool_for_each_of_its_ranges(
    type_: str, ipam: dict[str, Any], pools: dict[str, str]
) -> None:
    cluster = Cluster()
    cluster.define({"type": type_, **ipam})
    cluster.round()
    assert _pools(cluster) == pools
    for name in pools:
        assert cluster.condition("Ready", name) == ("True", "Decided")


def test_chains_are_read_and_other_ipam_plugins_left_alone() -> None:
    cluster = Cluster()
    cluster.define({"type": "host-local", "subnet": "10.9.0.0/24"}, "other")
    cluster.define({}, "chain")
    chain = (
        '{"cniVersion": "1.0.0", "name": "x", "plugins": [{"type": "ipoib", "ipam": '
        '{"type": "whereabouts", "range": "10.0.0.0/24"}}, {"type": "tuning"}, 7]}'
    )
    cluster.api.definitions[1] = definition(chain, "chain")
    for number, text in enumerate(("", "{", "[]", '{"plugins": {}}', '{"ipam": 7}')):
        cluster.define({}, f"odd-{number}")
        cluster.api.definitions[-1] = definition(text, f"odd-{number}")
    cluster.round()
    assert _pools(cluster) == {"10.0.0.0-24": "10.0.0.0/24"}
    assert cluster.api.events == []


def test_a_definition_with_a_mistake_gets_an_event_that_says_why_and_once() -> None:
    cluster = Cluster()
    cluster.define({"type": "whereabouts", "range": "10.0.0.0/33"})
    for _ in range(3):
        cluster.round()
    assert _pools(cluster) == {}
    (event,) = cluster.api.events
    assert event.reason == "NoAddressPool"
    assert "10.0.0.0/33" in event.message
    assert event.regarding["uid"] == "fabric-uid"
    assert cluster.seen.unusable == 1


@pytest.mark.parametrize("is_there", [False, True])
def test_a_definition_does_not_get_the_pool_of_another_range_with_its_name(is_there: bool) -> None:
    cluster = Cluster()
    if is_there:
        cluster.pool("fd00:1::/64", name="fd00-1--0-64")
    else:
        cluster.define({"type": "whereabouts", "range": "fd00:1::/64"}, "first")
    cluster.define({"type": "whereabouts", "range": "1::/64", "network_name": "fd00"}, "second")
    cluster.run(5)
    assert _pools(cluster) == {"fd00-1--0-64": "fd00:1::/64"}
    (event,) = cluster.api.events
    assert (event.reason, event.regarding["name"]) == ("NoAddressPool", "second")
    assert (
        "fd00-1--0-64 has the range fd00:1::/64, but the network has the range 1::/64"
        in event.message
    )


def test_many_mistakes_are_so_many_events_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "MOST_OF_NAMESPACE", 3)
    cluster = Cluster()
    for number in range(5):
        cluster.define({"type": "whereabouts", "range": "10.0.0.0/33"}, f"wrong-{number}")
    cluster.run(20)
    assert len(cluster.api.events) == 3
    cluster.run(warnings.EVENTS_IN, every=60)
    assert {event.regarding["name"] for event in cluster.api.events} == {
        f"wrong-{number}" for number in range(5)
    }
    assert len(cluster.api.events) <= 6


def test_the_mistakes_of_one_namespace_silence_no_warning_on_another() -> None:
    cluster = Cluster()
    for number in range(warnings.MOST_EVENTS + 1):
        cluster.define({"type": "whereabouts", "range": "10.0.0.0/33"}, f"wrong-{number}", "noisy")
    cluster.round()
    cluster.define({"type": "whereabouts", "range": "10.0.0.0/33"}, "mine", "quiet")
    cluster.round()
    assert "mine" in {event.regarding["name"] for event in cluster.api.events}


def test_a_pool_that_is_refused_is_an_event_and_tried_again_now_and_then() -> None:
    refused = [Fault.REFUSED]

    def faults(verb: str, kind: str, name: str) -> Fault | None:
        return refused[0] if refused and (verb, kind) == ("create", "AddressPool") else None

    cluster = Cluster(faults)
    cluster.define({"type": "whereabouts", "range": "10.0.0.0/24"})
    cluster.run(definitions.REFUSED_AGAIN)
    assert cluster.client.calls["create", "AddressPool"] == 1
    (event,) = cluster.api.events
    assert (event.reason, event.regarding["name"]) == ("NoAddressPool", "fabric")
    assert cluster.seen.unusable == 1
    refused.clear()
    cluster.run(2)
    assert cluster.condition("Ready", "10.0.0.0-24") == ("True", "Decided")
    assert cluster.seen.unusable == 0


def test_a_pool_goes_a_while_after_its_definition_and_its_last_block() -> None:
    cluster = Cluster()
    cluster.define({"type": "whereabouts", "range": "10.0.0.0/24"})
    cluster.round()
    block = cluster.block("10.0.0.8", cluster.node("gpu-1"), pool="10.0.0.0-24")
    cluster.api.definitions.clear()
    cluster.run(2 * UNUSED_FOR, every=100)
    cluster.api.remove(AddressBlock, block.metadata.name)
    cluster.run(UNUSED_FOR / 2, every=100)
    assert _pools(cluster) == {"10.0.0.0-24": "10.0.0.0/24"}
    cluster.run(UNUSED_FOR, every=100)
    assert not _pools(cluster)


def test_a_pool_that_a_person_made_or_changed_stays() -> None:
    cluster = Cluster()
    cluster.define({"type": "whereabouts", "range": "10.0.0.0/24"})
    cluster.pool("10.2.0.0/24", name="own")
    cluster.round()
    pool = cluster.pool_now("10.0.0.0-24")
    cluster.api.update(replace(pool, spec=replace(pool.spec, exclude=("10.0.0.9",))))
    cluster.api.definitions.clear()
    cluster.run(3 * UNUSED_FOR, every=100)
    assert len(_pools(cluster)) == 2


@pytest.mark.parametrize("is_used", [False, True], ids=["unused", "used"])
@pytest.mark.parametrize("written", [0, 64])
def test_a_tenants_small_range_keeps_no_pool_of_a_person_from_being_ready(
    written: int, is_used: bool
) -> None:
    cluster = Cluster()
    cluster.define({"type": "whereabouts", "range": "10.64.0.0/29"})
    cluster.round()
    if is_used:
        cluster.block("10.64.0.1", cluster.node("gpu-1"), prefix=32, pool="10.64.0.0-29")
    cluster.pool("10.64.0.0/16", block_size=written)
    cluster.run(2 * COUNTS_EVERY)
    assert cluster.condition("Ready") == (
        "True",
        "BlockSizeLater" if is_used and written else "Decided",
    )
    assert cluster.pool_now().status.block_size == (1 if is_used else written or 128)


@pytest.mark.parametrize(
    ("cidr", "nodes", "size"),
    [
        ("10.0.0.0/16", 8, 128),
        ("10.0.0.0/16", 512, 32),
        ("10.0.0.0/24", 1, 8),
        ("10.0.0.0/26", 64, 1),
        ("10.0.0.0/32", 5000, 1),
        ("fd00::/64", 5000, 128),
    ],
)
def test_each_node_can_have_four_blocks_of_the_automatic_size(
    cidr: str, nodes: int, size: int
) -> None:
    network: Network = parse_interface(cidr)[1]
    assert automatic_size(network, nodes) == size


def test_the_status_counts_blocks_and_addresses_and_maps_what_is_leased() -> None:
    cluster = Cluster()
    node = cluster.node("gpu-1")
    cluster.pool(exclude=("10.64.0.8-10.64.0.15", "nonsense"))
    block = cluster.block("10.64.0.16", node)
    cluster.api.update_status(replace(block, status=replace(block.status, used=5)))
    cluster.block("10.64.1.0", node)  # in the space, and outside of the pool
    cluster.round()
    status = cluster.pool_now().status
    assert (status.space, status.block_size) == ("default", 8)
    assert (status.blocks.total, status.blocks.leased) == (32, 1)
    assert (status.addresses.capacity, status.addresses.used) == (254 - 8, 5)
    assert status.free_map == block_layout.free_map([2], 32)
    assert cluster.condition("Conflict") == ("True", "BlocksContradict")
    assert cluster.condition("Exhausted") == ("False", "BlocksAreFree")


def test_a_pool_with_many_blocks_has_no_map() -> None:
    cluster = Cluster()
    cluster.pool("fd00::/64")
    cluster.block("fd00::180", cluster.node("gpu-1"), prefix=121)
    cluster.round()
    status = cluster.pool_now().status
    assert status.block_size == 128
    assert status.free_map == ""
    assert status.blocks.total == 1 << 57
    assert status.addresses.capacity == 2**63 - 1


def test_a_huge_pool_has_a_status_whatever_it_excludes() -> None:
    cluster = Cluster()
    cluster.pool("fd00::/48", exclude=("fd00::/49",))
    cluster.round()
    assert cluster.condition("Ready") == ("True", "Decided")
    assert cluster.condition("Exhausted") == ("False", "BlocksAreFree")


def test_a_pool_is_exhausted_when_every_block_with_a_usable_address_is_leased() -> None:
    cluster = Cluster()
    node = cluster.node("gpu-1")
    cluster.pool("10.64.0.0/29", exclude=("10.64.0.6",))
    for last in range(1, 6):
        cluster.round()
        assert cluster.condition("Exhausted") == ("False", "BlocksAreFree")
        cluster.now += 7
        cluster.block(f"10.64.0.{last}", node, prefix=32)
    cluster.round()
    assert cluster.pool_now().status.block_size == 1
    assert cluster.condition("Exhausted") == ("True", "NoBlockIsFree")
    times = {each.type: each.last_transition_time for each in cluster.pool_now().status.conditions}
    assert times["Ready"] < times["Exhausted"]
    cluster.api.remove(AddressBlock, "default.10.64.0.3-32")
    cluster.round()
    assert cluster.condition("Exhausted") == ("False", "BlocksAreFree")


def test_a_round_without_news_writes_nothing() -> None:
    cluster = Cluster()
    cluster.define({"type": "whereabouts", "range": "10.0.0.0/24"})
    cluster.pool()
    cluster.block("10.64.0.8", cluster.node("gpu-1"))
    cluster.run(3)
    cluster.client.calls.clear()
    cluster.run(100)
    assert {verb for verb, _ in cluster.client.calls} == {"list"}


def test_how_many_addresses_are_used_is_written_now_and_then() -> None:
    cluster = Cluster()
    cluster.pool()
    block = cluster.block("10.64.0.8", cluster.node("gpu-1"))
    cluster.round()
    cluster.client.calls.clear()
    for used in range(1, 31):
        block = cluster.api.update_status(replace(block, status=replace(block.status, used=used)))
        cluster.run(1)
    assert cluster.client.calls["update_status", "AddressPool"] == 30 / USED_EVERY
    cluster.run(USED_EVERY)
    assert cluster.pool_now().status.addresses.used == 30


def test_a_pool_that_overlaps_another_has_its_block_size() -> None:
    cluster = Cluster()
    cluster.pool("10.64.0.0/16", name="wide")
    cluster.round()
    assert cluster.pool_now("wide").status.block_size == 128
    cluster.now += 60
    cluster.pool("10.64.1.0/24", name="narrow")
    cluster.pool("10.65.1.0/24", name="apart")
    cluster.pool("10.64.2.0/26", name="small")
    cluster.pool("10.64.3.0/24", name="other", block_size=32)
    cluster.round()
    sizes = {name: cluster.pool_now(name).status.block_size for name in _pools(cluster)}
    assert sizes == {"wide": 128, "narrow": 128, "apart": 8, "small": 0, "other": 0}
    assert cluster.condition("Ready", "narrow") == ("True", "Decided")
    assert cluster.condition("Ready", "small") == ("False", "BlockSizeDiffers")
    assert cluster.condition("Ready", "other") == ("False", "BlockSizeDiffers")


def test_a_pool_over_two_of_different_block_sizes_changes_neither_while_one_has_blocks() -> None:
    cluster = Cluster()
    cluster.pool("10.64.0.0/22", name="first")
    cluster.pool("10.64.8.0/21", name="second")
    cluster.round()
    cluster.block("10.64.8.64", cluster.node("gpu-1"), prefix=26, pool="second")
    cluster.pool("10.64.0.0/20", name="over-both")
    cluster.run(2 * COUNTS_EVERY)
    sizes = {name: cluster.pool_now(name).status.block_size for name in _pools(cluster)}
    assert sizes == {"first": 32, "second": 64, "over-both": 0}
    assert cluster.condition("Ready", "first") == ("True", "Decided")
    assert cluster.condition("Ready", "second") == ("True", "Decided")
    assert cluster.condition("Ready", "over-both") == ("False", "BlockSizeDiffers")
    cluster.api.remove(AddressBlock, "default.10.64.8.64-26")
    cluster.run(2 * COUNTS_EVERY)
    sizes = {name: cluster.pool_now(name).status.block_size for name in _pools(cluster)}
    assert set(sizes.values()) == {32}


def test_pools_of_different_networks_do_not_meet() -> None:
    cluster = Cluster()
    cluster.pool("10.64.0.0/16", name="blue", network_name="blue")
    cluster.pool("10.64.0.0/24", name="red", network_name="red")
    cluster.round()
    assert cluster.pool_now("blue").status.space == "blue"
    assert cluster.pool_now("blue").status.block_size == 128
    assert cluster.pool_now("red").status.block_size == 8


def test_a_range_that_is_no_network_is_not_ready() -> None:
    cluster = Cluster()
    cluster.pool("10.64.0.1/24", name="host-bits")
    cluster.pool("nonsense", name="nonsense")
    cluster.round()
    assert cluster.condition("Ready", "host-bits") == ("False", "InvalidRange")
    assert cluster.condition("Ready", "nonsense") == ("False", "InvalidRange")


def _set_block_size(cluster: Cluster, size: int) -> None:
    pool = cluster.pool_now()
    cluster.api.update(replace(pool, spec=replace(pool.spec, block_size=size)))


def test_another_block_size_waits_until_no_block_exists() -> None:
    cluster = Cluster()
    cluster.pool()
    block = cluster.block("10.64.0.8", cluster.node("gpu-1"))
    cluster.round()
    _set_block_size(cluster, 16)
    cluster.run(2 * COUNTS_EVERY)
    assert cluster.pool_now().status.block_size == 8
    assert cluster.condition("Ready") == ("True", "BlockSizeLater")
    cluster.api.remove(AddressBlock, block.metadata.name)
    cluster.round()
    assert cluster.pool_now().status.block_size == 0
    assert cluster.condition("Ready") == ("False", "Changing")
    cluster.round()
    assert cluster.pool_now().status.block_size == 16
    assert cluster.condition("Ready") == ("True", "Decided")


def test_a_claim_that_was_under_way_stops_the_change_of_the_block_size() -> None:
    """Even if the round began without it: what is decided rests on a look."""
    cluster = Cluster()
    cluster.pool()
    cluster.round()
    _set_block_size(cluster, 16)
    cluster.round()
    world = cluster.world()
    cluster.block("10.64.0.8", cluster.node("gpu-1"))
    cluster.rounds.round(world)
    assert cluster.pool_now().status.block_size == 8
    assert cluster.condition("Ready") == ("True", "BlockSizeLater")


def test_a_watch_that_is_late_decides_nothing() -> None:
    """It shows a private pool before nodes could lease of it in a space of its own."""
    cluster = Cluster()
    cluster.pool(name="private", shared=False)
    early = cluster.world()
    cluster.round()
    shared = cluster.pool(name="shared")
    cluster.rounds.round(replace(early, pools=(*early.pools, shared)))
    assert cluster.condition("Ready", "shared") == ("False", "Changing")


def test_the_block_size_of_a_lost_status_is_that_of_the_blocks() -> None:
    cluster = Cluster()
    cluster.pool()
    cluster.block("10.64.0.16", cluster.node("gpu-1"), prefix=28)
    cluster.round()
    assert cluster.pool_now().status.block_size == 16
    assert cluster.condition("Ready") == ("True", "Decided")


def test_a_private_range_that_is_also_shared_lies_in_the_shared_space() -> None:
    cluster = Cluster()
    cluster.pool(name="shared")
    cluster.pool(name="private", shared=False)
    cluster.pool("10.64.0.0/16", name="alone", shared=False)
    cluster.round()
    assert cluster.pool_now("private").status.space == "default"
    assert cluster.pool_now("alone").status.space == space_name("", "10.64.0.0/16", shared=False)
    assert cluster.pool_now("alone").status.block_size == 128


def test_a_shared_pool_waits_for_the_blocks_of_a_private_one_of_its_range() -> None:
    cluster = Cluster()
    own = space_name("", "10.64.0.0/24", shared=False)
    cluster.pool(name="private", shared=False)
    cluster.round()
    block = cluster.block("10.64.0.8", cluster.node("gpu-1"), space=own, pool="private")
    cluster.pool(name="shared")
    cluster.run(2 * COUNTS_EVERY)
    assert cluster.condition("Ready", "shared") == ("False", "PrivateBlocks")
    assert cluster.condition("Ready", "private") == ("True", "Decided")
    assert cluster.pool_now("private").status.space == own
    cluster.api.remove(AddressBlock, block.metadata.name)
    cluster.round()
    assert cluster.condition("Ready", "private") == ("False", "Changing")
    cluster.round()
    for name in ("private", "shared"):
        assert cluster.condition("Ready", name) == ("True", "Decided")
        assert cluster.pool_now(name).status.space == "default"


def test_blocks_that_overlap_are_a_conflict_that_names_both() -> None:
    cluster = Cluster()
    cluster.pool()
    cluster.block("10.64.0.8", cluster.node("gpu-1"))
    cluster.block("10.64.0.0", cluster.node("gpu-2"), prefix=28)
    cluster.round()
    assert cluster.condition("Conflict") == ("True", "BlocksContradict")
    (conflict,) = [each for each in cluster.pool_now().status.conditions if each.type == "Conflict"]
    assert "default.10.64.0.0-28 of node gpu-2 and default.10.64.0.8-29 of node gpu-1" in (
        conflict.message
    )
    assert cluster.seen.contradictions > 0


FORGED: dict[str, dict[str, Any]] = {
    "of another size": {"first": "10.64.0.16", "prefix": 28},
    "in another space": {"first": "10.64.0.16", "space": "other"},
    "in the space of the private range": {
        "first": "10.64.0.16",
        "space": space_name("", "10.64.0.0/24", shared=False),
    },
    "of addresses of another pool": {"first": "10.64.1.16", "prefix": 28},
    "for a pod's name": {
        "first": "10.64.0.16",
        "prefix": 28,
        "sticky": StickySpec(
            reservation="ns/web", pod="web-0", ifname="net1", address="10.64.0.16"
        ),
    },
}
"""Blocks that any node can write, and that name the first pool."""


@pytest.mark.parametrize("changes", FORGED.values(), ids=FORGED)
def test_a_block_that_is_not_what_its_pool_says_decides_nothing_and_is_a_conflict(
    changes: dict[str, Any],
) -> None:
    cluster = Cluster()
    cluster.pool()
    cluster.pool("10.64.1.0/24", name="next")
    node = cluster.node("gpu-1")
    cluster.round()
    cluster.block("10.64.0.8", node)
    cluster.run(2 * COUNTS_EVERY)
    before = {name: cluster.pool_now(name).status for name in ("pool", "next")}
    cluster.block(node=cluster.node("bad"), **changes)
    cluster.pool("10.64.0.0/25", name="later", block_size=8)
    cluster.pool("10.64.1.0/25", name="last", block_size=8)
    cluster.run(2 * COUNTS_EVERY)
    for name, status in before.items():
        now = cluster.pool_now(name).status
        kept = [each for each in now.conditions if each.type != "Conflict"]
        assert replace(now, conditions=tuple(kept)) == replace(
            status, conditions=tuple(each for each in status.conditions if each.type != "Conflict")
        )
    assert cluster.condition("Conflict") == ("True", "BlocksContradict")
    assert cluster.condition("Conflict", "next")[0] == "False"
    for name in ("later", "last"):
        assert cluster.condition("Ready", name) == ("True", "Decided")
    cluster.remove_node("bad")
    cluster.run(GONE_AFTER + OFFLINE + MARGIN + 3)
    assert cluster.counts.freed == 1


def test_a_block_whose_pool_is_gone_stops_no_pool_that_is_ready() -> None:
    cluster = Cluster()
    cluster.pool()
    cluster.round()
    for space in ("default", space_name("", "10.64.0.0/24", shared=False)):
        cluster.block("10.64.0.16", cluster.node("bad"), prefix=28, space=space, pool="gone")
    cluster.run(2 * COUNTS_EVERY)
    assert cluster.condition("Ready") == ("True", "Decided")
    assert cluster.pool_now().status.block_size == 8


def test_a_node_with_more_blocks_than_allowed_is_reported_once() -> None:
    cluster = Cluster()
    node = cluster.node("gpu-1")
    cluster.pool(max_blocks_per_node=1)
    cluster.block("10.64.0.8", node)
    cluster.round()
    assert (cluster.seen.over_limit, cluster.api.events) == (0, [])
    cluster.block("10.64.0.16", node)
    cluster.run(3)
    (event,) = cluster.api.events
    assert (event.reason, event.regarding["kind"]) == ("TooManyBlocks", "AddressPool")
    assert "gpu-1 holds 2 blocks, but spec.maxBlocksPerNode is 1" in event.message
    assert cluster.seen.over_limit == 1


def test_a_namespace_gets_so_many_pools_and_others_get_theirs() -> None:
    cluster = Cluster()
    cluster.pools_per_namespace = 2
    cluster.new_leader()
    cluster.pool("10.1.0.0/24", name="by-hand")
    for number in range(5):
        cluster.define({"type": "whereabouts", "range": f"10.70.{number}.0/24"}, f"n{number}")
    cluster.define({"type": "whereabouts", "range": "10.80.0.0/24"}, "other", "team-b")
    cluster.round()
    made = {"10.70.0.0-24", "10.70.1.0-24", "10.80.0.0-24", "by-hand"}
    assert _pools(cluster).keys() == made
    assert cluster.seen.unusable == 3
    told = [event for event in cluster.api.events if event.reason == "NoAddressPool"]
    assert [event.regarding["name"] for event in told] == ["n2", "n3", "n4"]
    assert "kubectl get apool -l ipam.podfabric.io/namespace=team-a" in told[0].message
    # Another leader counts what is there, and deleting one makes room for one.
    cluster.new_leader()
    cluster.round()
    assert _pools(cluster).keys() == made
    del cluster.api.definitions[0]
    cluster.api.remove(AddressPool, "10.70.0.0-24")
    cluster.round()
    assert _pools(cluster).keys() == made - {"10.70.0.0-24"} | {"10.70.2.0-24"}


def test_a_write_of_a_status_keeps_what_users_have_written_beside_it() -> None:
    cluster = Cluster()
    pool = cluster.pool()
    meta = replace(
        pool.metadata, labels={"team": "a"}, annotations={"note": "x"}, finalizers=("x/y",)
    )
    cluster.api.put(replace(pool, metadata=meta))
    cluster.round()
    after = cluster.pool_now()
    assert after.status.block_size
    assert (after.metadata.labels, after.metadata.annotations) == ({"team": "a"}, {"note": "x"})
    assert after.metadata.finalizers == ("x/y",)
