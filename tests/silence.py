"""An API server that gives no answer."""

import threading

from tests.waiting import PATIENCE


class Silence:
    """Faults of a client (`tests.fake_api`): calls of these `verbs` on one thread get no answer
    until `end`."""

    def __init__(self, thread: str, *verbs: str) -> None:
        self.verbs = verbs
        self.asked = threading.Event()
        self._thread = thread
        self._ended = threading.Event()

    def __call__(self, verb: str, kind: str, name: str) -> None:
        if verb in self.verbs and threading.current_thread().name == self._thread:
            self.asked.set()
            assert self._ended.wait(PATIENCE)

    def end(self) -> None:
        self._ended.set()
