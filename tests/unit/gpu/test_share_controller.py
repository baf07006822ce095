"""Compute shares of the groups of a node: from what was seen to their files."""

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import pytest

from gpu.limits import layout
from gpu.limits.groups import Groups
from gpu.watch.compute_shares import ShareController
from gpu.watch.sampled_time import UsedTime
from tests.unit.gpu.groups import PlainRegions
from tests.unit.gpu.made import A, B, limit

NS = 10**9
Control = Callable[[Mapping[tuple[str, str], float], Collection[str]], None]


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    return Groups(tmp_path, regions=PlainRegions())


class Clock:
    """CLOCK_MONOTONIC, which passes between the ticks of a controller."""

    def __init__(self) -> None:
        self.now = time.monotonic_ns()

    def __call__(self) -> int:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic_ns", made)
    return made


@pytest.fixture
def control(groups: Groups, clock: Clock) -> Control:
    """A controller, each of whose ticks is half a second later; it gets parts of the time."""
    return _controller(groups, clock)


def _controller(groups: Groups, clock: Clock) -> Control:
    controller = ShareController(groups)

    def tick(used: Mapping[tuple[str, str], float], measured: Collection[str]) -> None:
        clock.now += NS // 2
        controller(
            {key: UsedTime(part / 2) for key, part in used.items()}, dict.fromkeys(measured, 0.0)
        )

    return tick


def _in_force(groups: Groups, group: str) -> tuple[float, float]:
    """The share and kappa that the gates see."""
    entry = groups.read(group).limit
    return round(entry.compute_share, 4), round(entry.kappa, 3)


def _settled(groups: Groups, group: str) -> float:
    """The settled time that the gates read, in seconds of GPU time."""
    return round(groups.read(group).limit.settled_ns / NS, 3)


def _says(groups: Groups, group: str, **fields: int) -> None:
    """Write what a group's shims would write of a GPU."""
    gpu = layout.PfGpu(**fields)
    with (groups.root / group / "region").open("r+b") as opened:
        opened.seek(layout.USE_AT)
        opened.write(bytes(gpu))


def _paid(seconds: float, *, finished: bool = True) -> dict[str, int]:
    """Fields of a region whose launches paid for so much GPU time, all right."""
    ns = round(seconds * NS)
    done = ns if finished else 0
    return {"launched_ns": ns, "paid_ns": ns, "finished_ns": done, "paid_finished_ns": done}


def _made(groups: Groups, group: str, share: float) -> None:
    """A group that launched once."""
    groups.make(group, limit(share=share))
    _says(groups, group, **_paid(0.001))


def _launches(groups: Groups, *names: str) -> None:
    """They launch just before the next tick."""
    for name in names:
        _says(groups, name, last_launch=time.monotonic_ns() + NS // 2)


def test_a_group_that_uses_more_than_it_paid_for_owes_the_rest_and_pays_more(
    groups: Groups, control: Control
) -> None:
    groups.make("a", limit(share=0.3))
    groups.make("b", limit(share=0.7))
    for n in range(4):
        _says(groups, "a", **_paid(n * 0.1))
        _says(groups, "b", **_paid(n * 0.2))
        control({("a", A): 0.6, ("b", A): 0.4}, (A, B))
    assert _in_force(groups, "a")[1] > 1.2
    assert _settled(groups, "a") == pytest.approx(3 * (0.3 - 0.1))
    assert _in_force(groups, "b") == (0.7, 1.0)
    assert _settled(groups, "b") == 0


def test_a_group_that_pays_more_than_it_uses_gets_the_rest_back_and_pays_less(
    groups: Groups, control: Control
) -> None:
    groups.make("a", limit(share=0.5))
    for n in range(4):
        _says(groups, "a", **_paid(n * 0.25), tat=time.monotonic_ns())
        control({("a", A): 0.1}, (A, B))
    assert _in_force(groups, "a")[1] < 0.8
    assert _settled(groups, "a") == pytest.approx(3 * 0.05 - 2 * 0.25)


def test_a_group_gets_back_no_more_than_the_gate_lets_it_catch_up(
    groups: Groups, control: Control
) -> None:
    groups.make("a", limit(share=0.5))
    for n in range(4):
        _says(groups, "a", **_paid(n * 0.25), tat=time.monotonic_ns() - 14 * NS // 10)
        control({("a", A): 0.1}, (A, B))
    assert _settled(groups, "a") == pytest.approx(-2 * 0.5 * 0.1)


def test_what_is_settled_stays_when_limits_are_changed_or_written_again(
    groups: Groups, control: Control
) -> None:
    """The settled time counts from the first value. Another value would change the group's debt
    again.
    """
    _made(groups, "a", 0.5)
    for _ in range(3):
        control({("a", A): 0.5}, (A, B))
    assert _settled(groups, "a") == 0.5
    groups.settle("a")
    groups.make("a", limit(share=0.6))
    assert _settled(groups, "a") == 0.5


def test_a_gpu_of_which_the_driver_does_not_tell_is_shared_by_estimates_alone(
    groups: Groups, control: Control
) -> None:
    groups.make("a", limit(share=0.5))
    for n in range(4):
        _says(groups, "a", **_paid(n * 0.25), backlogged_at=time.monotonic_ns())
        control({}, (B,))
    assert _in_force(groups, "a") == (0.5, 1.0)
    assert _settled(groups, "a") == 0


def test_a_group_that_is_made_again_between_two_ticks_begins_anew(
    groups: Groups, control: Control
) -> None:
    groups.make("a", limit(share=0.3))
    for n in range(3):
        _says(groups, "a", **_paid(1000 + n * 0.15))
        control({("a", A): 0.3}, (A,))
    groups.remove("a")
    _made(groups, "a", 0.3)
    for _ in range(3):
        control({}, (A,))
    assert _settled(groups, "a") == 0


def test_what_the_driver_may_not_tell_of_many_processes_is_not_settled(
    groups: Groups, control: Control
) -> None:
    groups.make("a", limit(share=0.3))
    for slot in range(40):
        groups.register("a", slot, host_pid=1000 + slot, start_time=1)
    for n in range(20):
        _says(groups, "a", **_paid(0.001 + n * 0.15))
        control({}, (A,))
    assert (_settled(groups, "a"), _in_force(groups, "a")) == (0, (0.3, 1.0))


def test_a_tick_that_came_far_too_late_is_not_settled(
    groups: Groups, control: Control, clock: Clock
) -> None:
    _made(groups, "a", 0.3)
    control({("a", A): 0.3}, (A,))
    clock.now += 60 * NS
    _says(groups, "a", **_paid(18.15))
    control({("a", A): 1.0}, (A,))
    assert (_settled(groups, "a"), _in_force(groups, "a")) == (0, (0.3, 1.0))


def test_a_new_controller_goes_on_from_the_files(groups: Groups, clock: Clock) -> None:
    groups.make("a", limit(share=0.3))
    control = _controller(groups, clock)
    for n in range(6):
        _says(groups, "a", **_paid(n * 0.05))
        control({("a", A): 0.9}, (A, B))
    (_, kappa), settled = _in_force(groups, "a"), _settled(groups, "a")
    assert kappa > 2
    assert settled > 1
    control = _controller(groups, clock)
    for n in range(6):
        _says(groups, "a", **_paid(0.25 + n * 0.15))
        control({("a", A): 0.3}, (A, B))
    assert _settled(groups, "a") == settled


@pytest.mark.parametrize("spoiled", ["limits", "region"])
def test_a_group_that_spoils_a_file_disturbs_no_other(
    groups: Groups, control: Control, spoiled: str
) -> None:
    _made(groups, "a", 0.3)
    _made(groups, "b", 0.3)
    control({}, (A, B))
    (groups.root / "a" / spoiled).write_bytes(b"x")
    for _ in range(4):
        control({("a", A): 0.6, ("b", A): 0.6}, (A, B))
    assert _settled(groups, "b") == pytest.approx(4 * 0.3)
    if spoiled == "region":
        assert _settled(groups, "a") == pytest.approx(4 * 0.3)


def test_a_group_that_goes_while_its_shares_are_corrected_is_no_error(
    groups: Groups, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    _made(groups, "a", 0.3)
    _made(groups, "b", 0.3)
    names = groups.names()
    groups.remove("a")
    monkeypatch.setattr(groups, "names", lambda: names)
    for _ in range(4):
        control({("a", A): 0.6, ("b", A): 0.6}, (A, B))
    assert _settled(groups, "b") == pytest.approx(3 * 0.3)


def test_nothing_is_written_while_nothing_changes(groups: Groups, control: Control) -> None:
    groups.make("a", limit(share=0.3))
    path = groups.root / "a" / "limits"
    before = path.read_bytes()
    for n in range(4):
        _says(groups, "a", **_paid(n * 0.15))
        control({("a", A): 0.3 if n else 0.0}, (A, B))
    assert path.read_bytes() == before
