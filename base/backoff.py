"""Pauses between attempts, each twice as long as the one before."""


class Backoff:
    """Pauses of `first` seconds, then twice as many, up to `longest`. `next` is the next one."""

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self.next = first

    def pause(self) -> float:
        """How many seconds to wait now."""
        pause, self.next = self.next, min(2 * self.next, self._longest)
        return pause

    def reset(self) -> None:
        """An attempt went well."""
        self.next = self._first
