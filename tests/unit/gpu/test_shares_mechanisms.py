"""Each part of the gate and of the controller is needed: without the part, a simulation fails."""

from collections.abc import Callable

import pytest

from gpu.watch import time_account
from gpu.watch.time_account import TimeAccount
from tests.unit.gpu import simulator
from tests.unit.gpu.simulator import alike, worst_error


def _pair(kernel: float, wrong: float) -> float:
    return worst_error(alike(0.3, kernel, wrong), alike(0.3, kernel, wrong))


def test_little_is_in_the_drivers_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _pair(50e-3, 1 / 8) <= 1
    monkeypatch.setattr(simulator, "UNFINISHED", 60.0)
    assert _pair(50e-3, 1 / 8) > 5


_AFTER_TICK = time_account.after_tick


def _keeps(name: str) -> Callable[..., tuple[TimeAccount, float, float]]:
    """`after_tick` that does not change `settled` or `kappa`."""

    def after_tick(*seen: object, **options: float) -> tuple[TimeAccount, float, float]:
        account, settled, kappa = _AFTER_TICK(*seen, **options)  # type: ignore[arg-type]
        new = {"settled": settled, "kappa": kappa} | {name: options[name]}
        return account, new["settled"], new["kappa"]

    return after_tick


def test_what_was_used_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(_pair(1, 8), _pair(1, 1 / 8)) <= 1
    monkeypatch.setattr(time_account, "after_tick", _keeps("settled"))
    assert min(_pair(1, 8), _pair(1, 1 / 8)) > 5


def test_estimates_are_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _pair(1e-3, 8) <= 1
    monkeypatch.setattr(time_account, "after_tick", _keeps("kappa"))
    assert _pair(1e-3, 8) > 5


def test_a_group_that_was_held_up_by_others_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processes with long kernels leave a fifth of the time to the other group meanwhile."""

    def error() -> float:
        return worst_error(alike(0.3, 200e-3, processes=4), alike(0.7, 20e-6))

    assert error() <= 1
    monkeypatch.setattr(simulator, "LAG", simulator.BURST)
    assert error() > 5
