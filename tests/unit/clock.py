"""A clock for code that waits: time passes only when the code sleeps."""

import pytest


class Clock:
    """Stands in for the module `time` in base.interrupts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []
        monkeypatch.setattr("base.interrupts.time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds
