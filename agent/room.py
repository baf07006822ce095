"""How much memory large requests may take together. The others wait, in the order they came."""

import threading
import time
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

SETTLE = 1.0  # seconds for the calls' threads to drop what they made of the bytes

Who = TypeVar("Who", bound=Hashable)


class Room(Generic[Who]):
    """`size` bytes for requests, from any thread. A request may ask for at most all of them."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._lock = threading.Lock()
        self._held: dict[Who, int] = {}
        self._left: float | None = None  # when the last one gave back its bytes
        self._waiting: deque[tuple[Who, int]] = deque()

    def take(self, who: Who, size: int) -> bool:
        """Whether `who` has its bytes now. If not, it waits until `admitted` answers it."""
        with self._lock:
            if self._waiting or size > self._free:
                self._waiting.append((who, size))
                return False
            self._hold(who, size)
            return True

    def admitted(self) -> list[Who]:
        """Those that have waited and have their bytes from now on."""
        admitted = []
        with self._lock:
            while self._waiting and self._waiting[0][1] <= self._free:
                who, size = self._waiting.popleft()
                self._hold(who, size)
                admitted.append(who)
        return admitted

    def give_back(self, who: Who) -> bool:
        """Take back the bytes that `who` has or waits for. Answers whether others wait."""
        with self._lock:
            if who in self._held:
                self._free += self._held.pop(who)
                self._left = None if self._held else time.monotonic()
            if any(one is who for one, _ in self._waiting):
                self._waiting = deque(entry for entry in self._waiting if entry[0] is not who)
            return bool(self._waiting)

    def was_left(self) -> bool:
        """True once, SETTLE seconds after the last bytes came back."""
        with self._lock:
            left = self._left is not None and time.monotonic() >= self._left + SETTLE
            if left:
                self._left = None
            return left

    def _hold(self, who: Who, size: int) -> None:
        self._free -= size
        self._held[who] = size
        self._left = None
