"""How fast a client asks the API server: a token bucket, and the pauses that the server wants."""

import threading
import time
from collections.abc import Callable

RATE = 20.0  # requests a second
BURST = 40
LONGEST_PAUSE = 30.0  # seconds; a server that asks for more gets this much


class Pace:
    """Gives turns to the threads of one client, `rate` a second after `burst` at once."""

    def __init__(
        self,
        rate: float = RATE,
        burst: int = BURST,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._interval = 1 / rate
        self._allowance = (burst - 1) / rate
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._full_at = clock()  # when the bucket is full again
        self._paused_until = clock()

    def turn(self, patience: float) -> bool:
        """Wait for this thread's turn. False at once if that takes longer than `patience`."""
        with self._lock:
            now = self._clock()
            full_at = max(now, self._full_at)
            wait = max(full_at - self._allowance, self._paused_until) - now
            if wait > patience:
                return False
            self._full_at = full_at + self._interval
        if wait > 0:
            self._sleep(wait)
        return True

    def pause(self, seconds: float) -> None:
        """No request has a turn for so long: the server asked for it (Retry-After)."""
        with self._lock:
            until = self._clock() + min(seconds, LONGEST_PAUSE)
            self._paused_until = max(self._paused_until, until)
