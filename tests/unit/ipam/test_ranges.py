"""First and last usable address (whereabouts' GetIPRange table), and what exclusions leave."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipam.addresses import Interval, parse, parse_interface, text
from ipam.ranges import Range, merged, never_usable, of_network
from tests.unit.ipam.calls import range_of


@pytest.mark.parametrize(
    ("cidr", "start", "end", "first", "last"),
    [
        ("192.168.21.100/30", "", "", "192.168.21.101", "192.168.21.102"),
        ("192.168.2.200/24", "192.168.2.23", "", "192.168.2.23", "192.168.2.254"),
        ("192.168.2.200/27", "", "", "192.168.2.193", "192.168.2.222"),
        ("192.168.2.200/24", "", "192.168.2.100", "192.168.2.1", "192.168.2.100"),
        ("192.168.2.200/24", "192.168.2.50", "192.168.2.100", "192.168.2.50", "192.168.2.100"),
        ("192.168.0.0/23", "", "", "192.168.0.1", "192.168.1.254"),
        ("fd:db8:abcd:12::/96", "", "", "fd:db8:abcd:12::1", "fd:db8:abcd:12::ffff:fffe"),
        ("2001:db8::/64", "", "", "2001:db8::1", "2001:db8::ffff:ffff:ffff:fffe"),
        ("2001:db8::/64", "2001:db8::50", "2001:db8::100", "2001:db8::50", "2001:db8::100"),
        # the network and the broadcast address move to the nearest usable one
        ("192.168.0.0/29", "192.168.0.0", "", "192.168.0.1", "192.168.0.6"),
        ("192.168.0.0/29", "", "192.168.0.7", "192.168.0.1", "192.168.0.6"),
        ("192.168.0.0/29", "192.168.0.7", "192.168.0.7", "192.168.0.6", "192.168.0.6"),
    ],
)
def test_the_first_and_last_usable_address(
    cidr: str, start: str, end: str, first: str, last: str
) -> None:
    found = range_of(cidr, start, end)
    assert (text(found.first), text(found.last)) == (first, last)


@pytest.mark.parametrize(
    ("start", "end", "seen"),
    [
        ("192.168.1.150", "", "invalid range start for CIDR 192.168.2.0/24: 192.168.1.150"),
        ("", "192.168.3.100", "invalid range end for CIDR 192.168.2.0/24: 192.168.3.100"),
        ("192.168.2.100", "192.168.2.50", "range start 192.168.2.100 is after range end"),
        ("2001::1", "", "invalid range start"),
    ],
)
def test_a_start_or_end_that_cannot_be_is_refused_where_whereabouts_ignores_it(
    start: str, end: str, seen: str
) -> None:
    with pytest.raises(ValueError, match=seen):
        range_of("192.168.2.200/24", start, end)


@pytest.mark.parametrize("cidr", ["192.168.0.0/32", "192.168.0.0/31", "2000::/128", "2000::/127"])
def test_point_to_point_networks_need_use_all_addresses(cidr: str) -> None:
    with pytest.raises(ValueError, match="net mask is too short"):
        range_of(cidr)
    found = range_of(cidr, use_all=True)
    network = parse_interface(cidr)[1]
    assert (found.first, found.last) == (network.address, network.last)


def test_a_large_ipv6_network_never_yields_ipv4() -> None:
    network = parse_interface("::/64")[1]
    first, last = of_network(network)
    found = Range(network=network, first=first, last=last, excluded=never_usable(network))
    assert not found.allows(parse("::ffff:10.0.0.1"))
    assert found.allows(parse("::1:0:0:0"))


intervals = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(
    lambda pair: Interval(min(pair), max(pair))
)


@given(st.lists(intervals))
def test_merged_intervals_hold_the_same_addresses_in_order(given_intervals: list[Interval]) -> None:
    result = merged(given_intervals)
    assert members(result) == members(given_intervals)
    assert all(left.last + 1 < right.first for left, right in pairwise(result))


@given(st.lists(intervals), st.none() | st.integers(0, 60), intervals)
def test_what_is_allowed_is_the_range_without_exclusions_and_gateway(
    excluded: list[Interval], gateway: int | None, bounds: Interval
) -> None:
    found = Range(
        network=parse_interface("::/0")[1],
        first=bounds.first,
        last=bounds.last,
        excluded=merged(excluded),
        gateway=gateway,
    )
    parts = list(found.parts)
    expected = members([bounds]) - members(excluded) - {gateway}
    assert members(parts) == expected
    assert parts == sorted(parts)


def members(some: object) -> set[int]:
    assert isinstance(some, list | tuple)
    return {address for range_ in some for address in range(range_.first, range_.last + 1)}
