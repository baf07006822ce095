"""Ids that containers held before the plugin started are listed as healthy while a node boots."""

from collections.abc import Mapping

import pytest

from deviceplugin.availability import unavailable
from deviceplugin.checkpoint import Allocation
from deviceplugin.health import GONE
from deviceplugin.pools.pool import Pool
from deviceplugin.startup_grace import GRACE, StartupGrace
from tests.unit.deviceplugin.made import RESOURCE, A, B, allocation, hca, pool, rdma

PF = hca(A, rdma(0))
POOL = pool([PF, hca(B, rdma(1))])
HELD = {A: allocation(POOL, A, PF)}
BOOTING = {A: "port 1 of mlx5_0 is INIT (LinkUp)", B: "port 1 of mlx5_1 is INIT (LinkUp)"}


def expected(
    grace: StartupGrace,
    reports: Mapping[str, str | None],
    after: float,
    *,
    of: Pool = POOL,
    held: dict[str, Allocation] = HELD,
) -> frozenset[str]:
    return grace.expected_at_start(of, unavailable(of, reports, held), held, {}, 1000.0 + after)


@pytest.fixture
def grace() -> StartupGrace:
    return StartupGrace([(RESOURCE, A)], 1000.0)


@pytest.mark.parametrize(
    "fault", ["port 1 of mlx5_0 is INIT (LinkUp)", "port 1 of mlx5_0 is DOWN (Polling)", GONE]
)
def test_what_was_held_is_expected_until_the_minute_is_over(
    grace: StartupGrace, fault: str
) -> None:
    booting = {A: fault, B: fault}
    pending = []
    for after, wanted in ((0.0, {A}), (GRACE - 1.0, {A}), (GRACE, set()), (GRACE + 1.0, set())):
        assert expected(grace, booting, after) == wanted  # nobody held the other
        pending.append(grace.pending)
    assert pending == [True, True, False, False]


def test_hca_without_rdma_device_yet_is_expected(grace: StartupGrace) -> None:
    bare = pool([hca(A), hca(B, rdma(1))])
    assert expected(grace, {}, 0.0, of=bare) == {A}


def test_what_was_fit_once_and_breaks_is_not_expected(grace: StartupGrace) -> None:
    assert expected(grace, BOOTING, 0.0) == {A}
    assert expected(grace, {A: None, B: None}, 5.0) == frozenset()
    assert not grace.pending
    assert expected(grace, BOOTING, 10.0) == frozenset()


def test_what_is_free_by_now_is_not_expected(grace: StartupGrace) -> None:
    assert expected(grace, BOOTING, 0.0, held={}) == frozenset()


def test_id_with_other_device_numbers_by_now_is_not_expected(grace: StartupGrace) -> None:
    renumbered = pool([hca(A, rdma(5)), hca(B, rdma(1))])
    assert A in unavailable(renumbered, BOOTING, HELD)
    assert expected(grace, BOOTING, 0.0, of=renumbered) == frozenset()


def test_nothing_held_is_nothing_to_wait_for() -> None:
    assert not StartupGrace([], 1000.0).pending
