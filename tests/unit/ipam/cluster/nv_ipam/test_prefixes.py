"""Prefixes of nv-ipam's CIDRPools by themselves: which node gets which."""

import sys
from collections.abc import Callable, Mapping
from ipaddress import ip_network
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipam.addresses import Interval, Network, parse
from ipam.cluster.nv_ipam.objects import (
    ExcludedIndexes,
    ExcludedRun,
    Invalid,
    NvCIDRPool,
    NvCIDRPoolEntry,
    NvCIDRPoolSpec,
    NvCIDRPoolStatus,
    StaticPrefix,
)
from ipam.cluster.nv_ipam.prefixes import _Taken, cut
from ipam.cluster.objects import AddressShare, Meta, ShareSpec
from tests.unit.ipam.cluster.nv_ipam.nodes import NAMESPACE


def pool_of(entries: Mapping[str, str], **spec: object) -> NvCIDRPool:
    """A pool by itself."""
    keys = {"cidr": "10.8.0.0/26", "per_node_network_prefix": 29} | spec
    allocations = tuple(NvCIDRPoolEntry(node=node, prefix=at) for node, at in entries.items())
    return NvCIDRPool(
        metadata=Meta(name="routed", namespace=NAMESPACE),
        spec=NvCIDRPoolSpec(**keys),  # type: ignore[arg-type]
        status=NvCIDRPoolStatus(allocations=allocations),
    )


def cut_for(pool: NvCIDRPool, nodes: str, shares: tuple[AddressShare, ...] = ()) -> dict[str, str]:
    return {each.node: each.prefix for each in cut(pool, set(nodes), set(nodes), shares).entries}


def test_prefixes_that_are_excluded_are_passed_over() -> None:
    pool = pool_of(
        {},
        exclusions=(
            ExcludedRun(start="10.8.0.0", end="10.8.0.6"),  # all but the broadcast address
            ExcludedRun(start="10.8.0.9", end="10.8.0.30"),  # not the address of a network
        ),
    )
    assert cut_for(pool, "abc") == {"a": "10.8.0.8/29", "b": "10.8.0.32/29", "c": "10.8.0.40/29"}
    whole = pool_of({}, per_node_exclusions=(ExcludedIndexes(start_index=0, end_index=7),))
    assert cut(whole, {"a"}, {"a"}, ()).lacking == ("a",)


def test_a_large_pool_whose_prefixes_are_all_excluded_has_none() -> None:
    pool = pool_of(
        {},
        cidr="fd00::/64",
        per_node_network_prefix=127,
        exclusions=(ExcludedRun(start="fd00::8", end="fd00::9"),),
        per_node_exclusions=(ExcludedIndexes(start_index=0, end_index=1),),
    )
    assert cut(pool, {"a"}, {"a"}, ()).lacking == ("a",)


def test_of_two_nodes_with_one_prefix_one_gets_another() -> None:
    pool = pool_of({"a": "10.8.0.0/29", "b": "10.8.0.0/29"})
    shares = tuple(
        AddressShare(
            metadata=Meta(name=node),
            spec=ShareSpec(pool="cidrpool/routed", node=node, ranges=("10.8.0.1-10.8.0.6",)),
        )
        for node in "ab"
    )
    assert cut_for(pool, "ab", shares) == {"a": "10.8.0.0/29", "b": "10.8.0.8/29"}


def test_a_large_pool_of_small_prefixes_is_cut_at_once() -> None:
    run = ExcludedRun(start="fd00::", end="fd00::7fff:ffff:ffff:ffff")
    pool = pool_of(
        {}, cidr="fd00::/64", per_node_network_prefix=127, gateway_index=0, exclusions=(run,)
    )
    found = cut(pool, {"a", "b"}, {"a", "b"}, ()).entries
    assert [(each.prefix, each.gateway) for each in found] == [
        ("fd00::8000:0:0:0/127", "fd00::8000:0:0:0"),
        ("fd00::8000:0:0:2/127", "fd00::8000:0:0:2"),
    ]


@pytest.mark.parametrize("has_shares", [False, True])
def test_the_work_for_static_prefixes_grows_with_their_number(has_shares: bool) -> None:
    """Lines of code that run: they do not depend on what else the machine does."""

    def lines(count: int) -> int:
        nodes = [f"n{number:04}" for number in range(count)]
        cut_into = islice(ip_network("10.8.0.0/16").subnets(new_prefix=29), count)
        static = tuple(map(_static_prefix, nodes, map(str, cut_into)))
        pool = pool_of({}, cidr="10.8.0.0/16", static_allocations=static)
        shares = tuple(map(_share, nodes, static)) if has_shares else ()
        ran = 0

        def count_line(*_: object) -> Callable[..., Any]:
            nonlocal ran
            ran += 1
            return count_line

        before = sys.gettrace()
        sys.settrace(count_line)
        try:
            found = cut(pool, set(nodes), set(nodes), shares)
        finally:
            sys.settrace(before)
        assert {(each.node, each.prefix) for each in found.entries} == {
            (each.node, each.prefix) for each in static
        }
        return ran

    assert lines(400) < 6 * lines(100)


def _static_prefix(node: str, prefix: str) -> StaticPrefix:
    return StaticPrefix(node=node, prefix=prefix)


def _share(node: str, static: StaticPrefix) -> AddressShare:
    ranges = (static.prefix.replace("/29", "-") + static.prefix.replace("/29", ""),)
    spec = ShareSpec(pool="cidrpool/routed", node=node, ranges=ranges)
    return AddressShare(metadata=Meta(name=node), spec=spec)


_NETWORKS = st.builds(
    lambda at, prefix: Network(parse("10.8.0.0") + at * (1 << 128 - prefix), prefix),
    st.integers(0, 5),
    st.integers(123, 125),
)
_RUNS = st.builds(
    lambda first, more: Interval(parse("10.8.0.0") + first, parse("10.8.0.0") + first + more),
    st.integers(0, 40),
    st.integers(0, 20),
)


@given(
    st.lists(_NETWORKS, max_size=3),
    st.dictionaries(st.sampled_from("abc"), st.lists(_RUNS, max_size=3)),
    st.lists(_NETWORKS, max_size=2),
    _NETWORKS,
)
def test_a_prefix_is_free_if_nothing_of_other_nodes_has_an_address_of_it(
    staying: list[Network], used: dict[str, list[Interval]], later: list[Network], asked: Network
) -> None:
    taken = _Taken(staying, used)
    taken.given.update(later)
    for node in "abcd":
        others = [run for other, runs in used.items() if other != node for run in runs]
        others += [Interval(each.address, each.last) for each in staying]
        expected = asked not in later and not any(
            run.first <= asked.last and asked.address <= run.last for run in others
        )
        assert taken.is_free(asked, node) is expected


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"cidr": "10.8.0.1/26"}, "bits behind"),
        ({"per_node_network_prefix": 25}, "has no /25"),
        ({"per_node_network_prefix": 0}, "has no /0"),
        ({"per_node_network_prefix": 33}, "has no /33"),
        ({"gateway_index": 0}, "gatewayIndex"),
        ({"gateway_index": 7}, "gatewayIndex"),
        ({"default_gateway": True}, "gatewayIndex"),
        ({"static_allocations": (StaticPrefix(prefix="10.9.0.0/29"),)}, "none of the prefixes"),
        ({"static_allocations": (StaticPrefix(prefix="10.8.0.0/30"),)}, "none of the prefixes"),
        (
            {"static_allocations": (StaticPrefix(prefix="10.8.0.0/29", gateway="10.8.0.9"),)},
            "is outside of",
        ),
        ({"static_allocations": (StaticPrefix(prefix="10.8.0.0/29"),) * 2}, "twice"),
        ({"exclusions": (ExcludedRun(start="10.8.0.0", end="10.8.1.0"),)}, "are not all in"),
        ({"per_node_exclusions": (ExcludedIndexes(start_index=1, end_index=8),)}, "indexes"),
    ],
)
def test_a_spec_that_nv_ipam_refuses_is_invalid(spec: dict[str, object], said: str) -> None:
    with pytest.raises(Invalid, match=said):
        cut(pool_of({}, **spec), {"a"}, {"a"}, ())
