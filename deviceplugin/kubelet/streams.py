"""The ListAndWatch streams that are open on one pool, and when each has to send."""

import threading
import time
from collections.abc import Callable, Iterator

import grpc

COALESCE = 0.2  # seconds between two lists on one stream
MOST = 16  # at a time; each keeps a thread of the server's busy, so the oldest gives way


class Stream:
    """One caller that reads the list."""

    def __init__(self) -> None:
        self.opened = time.monotonic()
        self.ended = threading.Event()
        self._wake = threading.Event()
        self._again = threading.Event()

    def wake(self, *, again: bool = False) -> None:
        """The list may differ, or is to be sent `again` even if it does not."""
        if again:
            self._again.set()
        self._wake.set()

    def end(self) -> None:
        """Send nothing any more."""
        self.ended.set()
        self._wake.set()

    def turns(self) -> Iterator[bool]:
        """Once now, then after every `wake`, COALESCE apart, until the end: whether `again`."""
        while not self.ended.is_set():
            self._wake.clear()
            again = self._again.is_set()
            if again:  # or one that comes just now would be forgotten
                self._again.clear()
            yield again
            if not self.ended.wait(COALESCE):
                self._wake.wait()


class Streams:
    """Those of one pool. `on_change` is called when one comes or goes, with no lock held."""

    def __init__(self) -> None:
        self.on_change: Callable[[], object] = lambda: None
        self._lock = threading.Lock()
        self._open: list[Stream] = []  # the oldest first

    def open(self, context: grpc.ServicerContext) -> Stream:
        """A stream for this call; it ends with the call."""
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
        """End it and forget it. Again is fine."""
        stream.end()
        with self._lock:
            known = stream in self._open
            if known:
                self._open.remove(stream)
        if known:
            self.on_change()

    def changed(self, *, again: bool = False) -> None:
        """The list may differ: every stream looks, and sends it `again` in any case."""
        with self._lock:
            for stream in self._open:
                stream.wake(again=again)

    def end(self) -> None:
        """End all that are open now."""
        with self._lock:
            ending = list(self._open)
        for stream in ending:
            self.drop(stream)

    def since(self, moment: float) -> bool:
        """One that was opened at that time (time.monotonic()) or later is open."""
        with self._lock:
            return bool(self._open) and self._open[-1].opened >= moment

    @property
    def count(self) -> int:
        """How many are open."""
        with self._lock:
            return len(self._open)
