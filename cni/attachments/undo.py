"""Taking back what a call did when a later step of it fails."""

from collections.abc import Callable

from base import interrupts
from base.locks import Busy
from cni.attachments.entry import JournalDamaged
from cni.spec.errors import CNIError
from cni.spec.notes import note
from host.errors import HostError


class Undo:
    """What to take back if the block is left by an exception, the latest first.

    A step that fails ends it: an address must not be released while the interface has it. The
    journal's entry goes `last`, so what could not be undone stays known, and DEL goes on there.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[str, Callable[[], object]]] = []
        self._last: Callable[[], object] = lambda: None

    def register(self, what: str, step: Callable[[], object]) -> None:
        """Undo `what` by `step`, before everything that was registered earlier."""
        self._steps.append((what, step))

    def last(self, step: Callable[[], object]) -> None:
        """Undo the journal's entry by `step`, if all else was undone."""
        self._last = step

    def __enter__(self) -> "Undo":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            return
        with interrupts.held():
            steps = [*reversed(self._steps), ("the journal's entry", self._last)]
            all(_tried(what, step) for what, step in steps)  # ends with the first failure


def _tried(what: str, step: Callable[[], object]) -> bool:
    try:
        step()
    except (CNIError, HostError, OSError, Busy, JournalDamaged) as error:
        note(f"undoing {what}: {error}")
        return False
    return True
