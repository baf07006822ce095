"""Limits the memory of large requests together. Requests without room wait in their order."""

import threading
import time
from collections import deque

from agent.serve.connections import LauncherConnection

SETTLE = 1.0  # seconds for the calls' threads to free their objects


class Room:
    """Gives `size` bytes to requests, from any thread. No request may ask for more than `size`."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._lock = threading.Lock()
        self._held: dict[LauncherConnection, int] = {}
        self._left: float | None = None  # when the last request returned its bytes
        self._waiting: deque[tuple[LauncherConnection, int]] = deque()

    def take(self, who: LauncherConnection, size: int) -> bool:
        """Whether `who` gets its bytes now. If not, it waits until `admitted` returns it."""
        with self._lock:
            if self._waiting or size > self._free:
                self._waiting.append((who, size))
                return False
            self._hold(who, size)
            return True

    def admitted(self) -> list[LauncherConnection]:
        """The waiting requests that get their bytes now."""
        admitted: list[LauncherConnection] = []
        if not self._waiting:  # nearly always
            return admitted
        with self._lock:
            while self._waiting and self._waiting[0][1] <= self._free:
                who, size = self._waiting.popleft()
                self._hold(who, size)
                admitted.append(who)
        return admitted

    def give_back(self, who: LauncherConnection) -> bool:
        """Return the bytes that `who` has or waits for; whether other requests wait."""
        with self._lock:
            if who in self._held:
                self._free += self._held.pop(who)
                self._left = None if self._held else time.monotonic()
            if self._waiting and any(waiting is who for waiting, _ in self._waiting):
                self._waiting = deque(entry for entry in self._waiting if entry[0] is not who)
            return bool(self._waiting)

    def was_left(self) -> bool:
        """True once, SETTLE seconds after the last request returned its bytes."""
        with self._lock:
            left = self._left is not None and time.monotonic() >= self._left + SETTLE
            if left:
                self._left = None
            return left

    def _hold(self, who: LauncherConnection, size: int) -> None:
        self._free -= size
        self._held[who] = size
        self._left = None
