"""Which blocks of a pool a claim tries: each once, in an order that differs from node to node."""

import random
from itertools import islice

import pytest

from ipam.addresses import parse_interface
from ipam.leases import block_layout
from ipam.leases.block_layout import Geometry
from ipam.leases.claim_request import Want
from ipam.leases.claims import Candidates
from tests.fake_api import FakeApi
from tests.unit.ipam.calls import range_of
from tests.unit.ipam.leases.nodes import put_pool


class CountingRandom(random.Random):
    """Counts the numbers that it draws."""

    drawn = 0

    def getrandbits(self, k: int, /) -> int:
        self.drawn += 1
        return super().getrandbits(k)


def tried(
    range_: str, size: int, instance: str, most: int = 1 << 20, leased: int | None = None
) -> tuple[list[int], int]:
    """The candidates of a claim in a pool of which nothing is leased; numbers that were drawn."""
    pool = put_pool(FakeApi(), range_, size=size)
    blocks = block_layout.of_pool(pool)
    assert blocks == Geometry(parse_interface(range_)[1], size)
    wanted = range_of(range_)
    candidates = Candidates(instance)
    if leased is not None:
        candidates.leased(leased)
    candidates._random = counting = CountingRandom(instance)
    want = Want(wanted, (wanted.domain, wanted.network))
    found = list(islice(candidates.of(pool, blocks, want, (), use_map=True), most))
    return found, counting.drawn


def test_two_nodes_try_the_blocks_in_different_orders() -> None:
    assert tried("10.0.0.0/20", 16, "a") == tried("10.0.0.0/20", 16, "a")
    assert tried("10.0.0.0/20", 16, "a")[0][:8] != tried("10.0.0.0/20", 16, "b")[0][:8]


@pytest.mark.parametrize("range_", ["10.0.0.0/20", "fd00::/64"])
def test_the_index_that_was_leased_last_is_tried_first(range_: str) -> None:
    assert tried(range_, 16, "a", most=1, leased=77) == ([77], 0)
    assert tried(range_, 16, "a", leased=77)[0][1:] == tried(range_, 16, "a")[0]
