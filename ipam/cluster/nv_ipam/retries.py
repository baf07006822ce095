"""When a request to the API server that failed is made again."""

import random
from collections.abc import Callable

FIRST, LONGEST = 5.0, 60.0  # seconds from a failure to the next attempt


class Retries:
    """For each thing its own: each pause is twice the one before.

    `chance` (0 to 1) spreads the attempts of many nodes, which failed together.
    """

    def __init__(
        self, clock: Callable[[], float], chance: Callable[[], float] = random.random
    ) -> None:
        self._clock = clock
        self._chance = chance
        self._pauses: dict[str, float] = {}
        self._at: dict[str, float] = {}

    def is_due(self, what: str) -> bool:
        """Whether it may be tried now."""
        return self._clock() >= self._at.get(what, -1.0)

    def failed(self, what: str) -> None:
        """It is tried again later."""
        pause = min(2 * self._pauses.get(what, FIRST / 2), LONGEST)
        self._pauses[what] = pause
        self._at[what] = self._clock() + pause * (0.75 + 0.5 * self._chance())

    def worked(self, what: str) -> None:
        """It need not be tried again."""
        self._pauses.pop(what, None)
        self._at.pop(what, None)

    def wait(self) -> float:
        """For how many seconds nothing is due."""
        now = self._clock()
        return max(0.0, min((at - now for at in self._at.values()), default=LONGEST))
