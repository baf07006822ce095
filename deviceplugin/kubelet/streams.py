"""The open ListAndWatch streams of a pool, and when each must send."""

import threading
import time
from collections.abc import Callable, Iterator

import grpc

COALESCE = 0.2  # seconds between two lists on one stream
MOST = 16  # open streams; each occupies a thread of the server. The oldest is closed first


class Stream:
    """One open ListAndWatch call."""

    def __init__(self) -> None:
        self.opened = time.monotonic()
        self.ended = threading.Event()
        self._wake = threading.Event()
        self._again = threading.Event()

    def wake(self, *, again: bool = False) -> None:
        """Have it compare the list, or with `again` send it even if it has not changed."""
        if again:
            self._again.set()
        self._wake.set()

    def end(self) -> None:
        """Have it send nothing more."""
        self.ended.set()
        self._wake.set()

    def turns(self) -> Iterator[bool]:
        """Yield now, then after each `wake`, at least COALESCE apart; the value is `again`."""
        while not self.ended.is_set():
            self._wake.clear()
            again = self._again.is_set()
            if again:  # only if set, or a wake at this moment would be lost
                self._again.clear()
            yield again
            if not self.ended.wait(COALESCE):
                self._wake.wait()


class Streams:
    """The streams of a pool. `on_change` is called, without a lock, when one opens or closes."""

    def __init__(self) -> None:
        self.on_change: Callable[[], object] = lambda: None
        self._lock = threading.Lock()
        self._open: list[Stream] = []  # oldest first

    def open(self, context: grpc.ServicerContext) -> Stream:
        """Open a stream for this call; it ends with the call."""
        stream = Stream()
        with self._lock:
            self._open.append(stream)
            extra = self._open[:-MOST]
        for old in extra:
            old.end()
        if not context.add_callback(lambda: self.drop(stream)):
            self.drop(stream)  # the call is over already
        self.on_change()
        return stream

    def drop(self, stream: Stream) -> None:
        """End a stream and remove it. May be called again."""
        stream.end()
        with self._lock:
            was_open = stream in self._open
            if was_open:
                self._open.remove(stream)
        if was_open:
            self.on_change()

    def changed(self, *, again: bool = False) -> None:
        """Have every stream compare the list, or with `again` send it in any case."""
        with self._lock:
            for stream in self._open:
                stream.wake(again=again)

    def end(self) -> None:
        """End all open streams."""
        with self._lock:
            ending = list(self._open)
        for stream in ending:
            self.drop(stream)

    def since(self, moment: float) -> bool:
        """Whether a stream is open that was opened at `moment` (time.monotonic()) or later."""
        with self._lock:
            return bool(self._open) and self._open[-1].opened >= moment

    @property
    def count(self) -> int:
        """The number of open streams."""
        with self._lock:
            return len(self._open)
