"""Ranges that overlap, as whereabouts' users have them: row A12, with 16 nodes."""

from pathlib import Path

import pytest

from tests.fake_api import FakeApi
from tests.unit.ipam.leases.nodes import ClusterNode, put_pool

WIDE, NARROW = "10.0.0.0/24", "10.0.0.0/25"
NODES = 16


@pytest.mark.parametrize("shared", [True, False])
def test_two_ranges_of_one_network_name(memory_path: Path, shared: bool) -> None:
    server = FakeApi()
    for range_ in (WIDE, NARROW):
        # Private ranges hand out most of the same few addresses.
        exclude = ("10.0.0.52-10.0.0.127",) if not shared else ()
        exclude = (*exclude, "10.0.0.128/25") if not shared and range_ == WIDE else exclude
        put_pool(server, range_, name="blue", size=1, shared=shared, exclude=exclude)
    nodes = [ClusterNode(server, memory_path / f"{n}", f"node-{n}") for n in range(NODES)]
    given: dict[str, list[str]] = {WIDE: [], NARROW: []}
    for number in range(3):
        for node in nodes:
            for range_ in (WIDE, NARROW):
                ipam = {
                    "range": range_,
                    "network_name": "blue",
                    "enable_overlapping_ranges": shared,
                }
                given[range_] += node.add(f"p{number}-{range_[-2:]}", ipam)
    for addresses in given.values():
        assert len(set(addresses)) == len(addresses) == 3 * NODES
    assert all(int(address.rpartition(".")[2]) < 128 for address in given[NARROW])
    both = set(given[WIDE]) & set(given[NARROW])
    assert not both if shared else both
