"""Compute shares of the groups of a node: from what was seen to their files."""

import time
from pathlib import Path

import pytest

from gpu import layout, limits_file
from gpu.groups import Compute, Groups
from gpu.share_controller import ShareController
from tests.unit.gpu.groups import PlainRooms
from tests.unit.gpu.made import A, B, limit


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    return Groups(tmp_path, rooms=PlainRooms())


def _in_force(groups: Groups, group: str, index: int = 0) -> tuple[float, float]:
    """The share and kappa that the gates see."""
    entry = groups.read(group).in_force[index]
    return round(entry.share, 4), round(entry.kappa, 3)


def _says(groups: Groups, group: str, **fields: int) -> None:
    """Write what a group's shims would write of their first GPU."""
    gpu = layout.PfGpu(**fields)
    with (groups.root / group / "region").open("r+b") as opened:
        opened.seek(layout.USE_AT)
        opened.write(bytes(gpu))


def _launches(groups: Groups, *names: str) -> None:
    for name in names:
        _says(groups, name, last_launch=time.monotonic_ns())


def test_a_group_that_uses_more_than_its_share_pays_more(groups: Groups) -> None:
    groups.make("a", [limit(share=0.3)])
    groups.make("b", [limit(share=0.7)])
    control = ShareController(groups)
    for _ in range(4):
        control({("a", A): 0.6, ("b", A): 0.4}, (A, B))
    assert _in_force(groups, "a")[1] > 1.2
    assert _in_force(groups, "b") == (0.7, 1.0)  # its launches do not wait


def test_a_group_whose_launches_wait_below_its_share_pays_less(groups: Groups) -> None:
    groups.make("a", [limit(share=0.5)])
    control = ShareController(groups)
    for _ in range(4):
        _says(groups, "a", backlogged_at=time.monotonic_ns())
        control({("a", A): 0.1}, (A, B))
    assert _in_force(groups, "a")[1] < 0.8


def test_what_is_owed_for_a_far_too_large_estimate_is_remitted_once(groups: Groups) -> None:
    groups.make("a", [limit(share=0.5)])
    control = ShareController(groups)
    began = time.monotonic_ns()
    control({}, (A, B))
    debts = []
    for used in (0.2, 0.0, 0.0, 0.0):
        now = time.monotonic_ns()
        waits = {"backlogged_at": now, "longest_ns": 10**10, "longest_at": now}
        _says(groups, "a", tat=began + 2 * 10**10, **waits)
        control({("a", A): used}, (A, B))
        debts.append(groups.read("a").in_force[0].most_debt_ns)
    assert debts == [60 * 10**9, 60 * 10**9, 7 * 10**8, 60 * 10**9]
    assert _in_force(groups, "a")[1] == pytest.approx(1 / 16, rel=0.1)


def _remits(groups: Groups) -> ShareController:
    """A controller that has just written a smaller debt, for one tick."""
    groups.make("a", [limit(share=0.5)])
    control = ShareController(groups)
    groups.set_compute("a", {A: Compute(0.5, kappa=0.25, most_debt=0.7)})
    return control


def _most_debt(groups: Groups) -> int:
    return groups.read("a").in_force[0].most_debt_ns


def test_a_debt_that_was_remitted_for_a_tick_is_whole_after_an_agent_that_stops(
    groups: Groups,
) -> None:
    """Otherwise no launch of the group would cost more, as long as no agent runs."""
    control = _remits(groups)
    control.settle()
    assert _most_debt(groups) == limits_file.MOST_DEBT
    assert _in_force(groups, "a") == (0.5, 0.25)


@pytest.mark.parametrize("measured", [(), (A, B)], ids=["without a driver", "with one"])
def test_a_debt_that_was_remitted_for_a_tick_is_whole_after_the_first_tick_of_the_next_agent(
    groups: Groups, measured: tuple[str, ...]
) -> None:
    """The one that wrote it was killed within that tick."""
    _remits(groups)
    now = time.monotonic_ns()
    waits = {"backlogged_at": now, "longest_ns": 10**10, "longest_at": now}
    _says(groups, "a", tat=now + 2 * 10**10, **waits)
    ShareController(groups)({("a", A): 0.2}, measured)
    assert _most_debt(groups) == limits_file.MOST_DEBT


def test_a_gpu_of_which_the_driver_does_not_tell_is_shared_by_estimates_alone(
    groups: Groups,
) -> None:
    groups.make("a", [limit(share=0.5)])
    control = ShareController(groups)
    for _ in range(4):
        _says(groups, "a", backlogged_at=time.monotonic_ns())
        control({}, (B,))
    assert _in_force(groups, "a") == (0.5, 1.0)


def test_elastic_groups_get_what_idle_ones_leave(groups: Groups) -> None:
    for name, share in (("a", 0.3), ("b", 0.7), ("fixed", 0.2)):
        groups.make(name, [limit(share=share, elastic=name != "fixed")])
    control = ShareController(groups)
    _launches(groups, "a")
    control({}, (A, B))
    assert _in_force(groups, "a")[0] == 1.0
    _launches(groups, "a", "fixed")
    control({}, (A, B))
    assert _in_force(groups, "a")[0] == 0.8
    assert _in_force(groups, "fixed")[0] == 0.2
    _launches(groups, "a", "b")
    control({}, (A, B))
    assert (_in_force(groups, "a")[0], _in_force(groups, "b")[0]) == (0.3, 0.7)


def test_elastic_groups_have_their_own_shares_when_the_controller_ends(groups: Groups) -> None:
    groups.make("a", [limit(share=0.3, elastic=True)])
    groups.make("fixed", [limit(share=0.5)])
    control = ShareController(groups)
    for _ in range(4):
        _launches(groups, "a")
        control({("fixed", A): 0.9}, (A,))
    assert _in_force(groups, "a")[0] == 1.0
    control.settle()
    assert _in_force(groups, "a")[0] == 0.3
    assert _in_force(groups, "fixed")[1] > 1.2  # what was learnt of it stays


def test_each_gpu_is_shared_by_itself(groups: Groups) -> None:
    groups.make("a", [limit(A, share=0.5), limit(B, share=0.25)])
    groups.make("b", [limit(B, share=0.5)])
    control = ShareController(groups)
    for _ in range(4):
        control({("a", B): 0.9}, (A, B))
    assert _in_force(groups, "a", 0) == (0.5, 1.0)
    assert _in_force(groups, "a", 1)[1] > 1.2
    assert _in_force(groups, "b") == (0.5, 1.0)


def test_a_new_controller_goes_on_from_the_files(groups: Groups) -> None:
    groups.make("a", [limit(share=0.3)])
    for _ in range(6):
        ShareController(groups)({("a", A): 0.9}, (A, B))
    kappa = _in_force(groups, "a")[1]
    assert kappa > 2
    ShareController(groups)({("a", A): 0.3}, (A, B))
    assert _in_force(groups, "a") == (0.3, kappa)


def test_a_share_that_is_held_down_for_its_memory_stays_down_and_is_what_counts(
    groups: Groups,
) -> None:
    groups.make("a", [limit(share=0.5)])
    groups.throttle("a", A, 0.01)
    control = ShareController(groups)
    for _ in range(4):
        control({("a", A): 0.3}, (A, B))
    share, kappa = _in_force(groups, "a")
    assert share == 0.01
    assert kappa > 1.2


@pytest.mark.parametrize("spoiled", ["limits", "region"])
def test_a_group_that_spoils_a_file_disturbs_no_other(groups: Groups, spoiled: str) -> None:
    groups.make("a", [limit(share=0.3)])
    groups.make("b", [limit(share=0.3)])
    (groups.root / "a" / spoiled).write_bytes(b"x")
    control = ShareController(groups)
    for _ in range(4):
        control({("a", A): 0.6, ("b", A): 0.6}, (A, B))
    assert _in_force(groups, "b")[1] > 1.2
    if spoiled == "region":
        assert _in_force(groups, "a")[1] > 1.2


def test_a_group_that_goes_while_its_shares_are_corrected_is_no_error(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups.make("a", [limit(share=0.3)])
    groups.make("b", [limit(share=0.3)])
    names = groups.names()
    groups.remove("a")
    monkeypatch.setattr(groups, "names", lambda: names)
    control = ShareController(groups)
    for _ in range(4):
        control({("a", A): 0.6, ("b", A): 0.6}, (A, B))
    assert _in_force(groups, "b")[1] > 1.2


def test_nothing_is_written_while_nothing_changes(groups: Groups) -> None:
    groups.make("a", [limit(share=0.3)])
    control = ShareController(groups)
    path = groups.root / "a" / "limits"
    before = path.read_bytes()
    for _ in range(4):
        control({}, (A, B))
    assert path.read_bytes() == before
