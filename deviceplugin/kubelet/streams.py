"""The open ListAndWatch streams of a pool, and when each must send."""

import threading
import time
from collections.abc import Callable, Iterator

import grpc

COALESCE = 0.2  # seconds between two lists on one stream
MOST = 16  # open streams, each in a thread of the server. The oldest is closed first.


class _Stream:
    def __init__(self) -> None:
        self.opened = time.monotonic()
        self.ended = False
        self.woken = True  # it must compare the list
        self.again = False  # it must send the list even if unchanged


class Streams:
    """The streams of a pool. Calls `on_change`, without a lock, when a stream opens or closes."""

    def __init__(self) -> None:
        self.on_change: Callable[[], object] = lambda: None
        self._changed = threading.Condition()  # of what the streams are
        self._open: list[_Stream] = []  # oldest first

    def turns(self, context: grpc.ServicerContext) -> Iterator[bool]:
        """Yields when this call must compare the list: now, then after `changed`, COALESCE apart.

        The value is whether it must send the list even if that has not changed.
        """
        stream = _Stream()
        with self._changed:
            self._open.append(stream)
            self._end(self._open[:-MOST])
        if not context.add_callback(lambda: self._drop(stream)):
            self._drop(stream)  # the call is over already
        self.on_change()
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: stream.woken or stream.ended)
                    if stream.ended:
                        return
                    again, stream.again, stream.woken = stream.again, False, False
                yield again
                with self._changed:
                    self._changed.wait_for(lambda: stream.ended, COALESCE)
        finally:
            self._drop(stream)

    def changed(self, *, again: bool = False) -> None:
        """Make every stream compare the list, or with `again` send it in any case."""
        with self._changed:
            for stream in self._open:
                stream.woken = True
                stream.again |= again
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._end(list(self._open))
        self.on_change()

    def since(self, moment: float) -> bool:
        """Whether a stream is open that was opened at `moment` (time.monotonic()) or later."""
        with self._changed:
            return bool(self._open) and self._open[-1].opened >= moment

    @property
    def count(self) -> int:
        with self._changed:
            return len(self._open)

    def _drop(self, stream: _Stream) -> None:
        with self._changed:
            was_open = not stream.ended
            if was_open:
                self._end([stream])
        if was_open:
            self.on_change()

    def _end(self, streams: list[_Stream]) -> None:
        for stream in streams:
            stream.ended = True
            self._open.remove(stream)
        self._changed.notify_all()
