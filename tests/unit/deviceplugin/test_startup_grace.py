"""What containers held before the plugin began is hoped for while a node boots."""

import pytest

from deviceplugin.availability import unfit
from deviceplugin.checkpoint import Allocation
from deviceplugin.health import GONE
from deviceplugin.pools.pool import Pool
from deviceplugin.startup_grace import GRACE, Grace
from tests.unit.deviceplugin.made import hca, pool, rdma
from tests.unit.deviceplugin.test_availability import RESOURCE, A, B, allocation

PF = hca(A, rdma(0))
POOL = pool([PF, hca(B, rdma(1))])
HELD = {A: allocation(POOL, A, PF)}
BOOTING = {A: "port 1 of mlx5_0 is INIT (LinkUp)", B: "port 1 of mlx5_1 is INIT (LinkUp)"}


def hoped(
    grace: Grace,
    reports: dict[str, str],
    after: float,
    *,
    of: Pool = POOL,
    held: dict[str, Allocation] = HELD,
) -> frozenset[str]:
    return grace.hoped(of, unfit(of, reports, held), held, {}, 1000.0 + after)


@pytest.fixture
def grace() -> Grace:
    return Grace([(RESOURCE, A)], 1000.0)


@pytest.mark.parametrize(
    "fault", ["port 1 of mlx5_0 is INIT (LinkUp)", "port 1 of mlx5_0 is DOWN (Polling)", GONE]
)
def test_what_was_held_is_hoped_for_until_the_minute_is_over(grace: Grace, fault: str) -> None:
    booting = {A: fault, B: fault}
    pending = []
    for after, expected in ((0.0, {A}), (GRACE - 1.0, {A}), (GRACE, set()), (GRACE + 1.0, set())):
        assert hoped(grace, booting, after) == expected  # nobody held the other
        pending.append(grace.pending)
    assert pending == [True, True, False, False]


def test_hca_without_rdma_device_yet_is_hoped_for(grace: Grace) -> None:
    bare = pool([hca(A), hca(B, rdma(1))])
    assert hoped(grace, {}, 0.0, of=bare) == {A}


def test_what_was_fit_once_and_breaks_is_not_hoped_for(grace: Grace) -> None:
    assert hoped(grace, BOOTING, 0.0) == {A}
    assert hoped(grace, {A: "", B: ""}, 5.0) == frozenset()
    assert not grace.pending
    assert hoped(grace, BOOTING, 10.0) == frozenset()


def test_what_is_free_by_now_is_not_hoped_for(grace: Grace) -> None:
    assert hoped(grace, BOOTING, 0.0, held={}) == frozenset()


def test_id_with_other_device_numbers_by_now_is_not_hoped_for(grace: Grace) -> None:
    renumbered = pool([hca(A, rdma(5)), hca(B, rdma(1))])
    assert A in unfit(renumbered, BOOTING, HELD)
    assert hoped(grace, BOOTING, 0.0, of=renumbered) == frozenset()


def test_nothing_held_is_nothing_to_wait_for() -> None:
    assert not Grace([], 1000.0).pending
