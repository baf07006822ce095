"""What each part of the gate and of the controller is for: without it, a simulation fails."""

from collections.abc import Callable

import msgspec
import pytest

from gpu.watch import compute_shares, time_account
from gpu.watch.time_account import Settlement
from tests.unit.gpu import simulator
from tests.unit.gpu.simulator import alike, worst_error


def _pair(kernel: float, wrong: float) -> float:
    return worst_error(alike(0.3, kernel, wrong), alike(0.3, kernel, wrong))


def test_little_is_in_the_drivers_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _pair(50e-3, 1 / 8) <= 1
    monkeypatch.setattr(simulator, "UNFINISHED", 60.0)
    assert _pair(50e-3, 1 / 8) > 5


def _keeps(name: str) -> Callable[..., Settlement]:
    """`after_tick` that leaves `settled` or `kappa` as it is."""

    def after_tick(*seen: object, **options: float) -> Settlement:
        after = time_account.after_tick(*seen, **options)  # type: ignore[arg-type]
        return msgspec.structs.replace(after, **{name: options[name]})

    return after_tick


def test_what_was_used_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(_pair(1, 8), _pair(1, 1 / 8)) <= 1
    monkeypatch.setattr(compute_shares, "after_tick", _keeps("settled"))
    assert min(_pair(1, 8), _pair(1, 1 / 8)) > 5


def test_estimates_are_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _pair(1e-3, 8) <= 1
    monkeypatch.setattr(compute_shares, "after_tick", _keeps("kappa"))
    assert _pair(1e-3, 8) > 5


def test_a_group_that_was_held_up_by_others_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processes with long kernels leave a fifth of the time to the other group meanwhile."""

    def error() -> float:
        return worst_error(alike(0.3, 200e-3, processes=4), alike(0.7, 20e-6))

    assert error() <= 1
    monkeypatch.setattr(simulator, "LAG", simulator.BURST)
    assert error() > 5
