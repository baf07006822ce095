"""What a call does with errors from below: undo, collect, or translate them for the runtime."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from base import interrupts
from base.locks import Busy
from cni.attachments.journal import JournalDamaged
from cni.spec.errors import CNIError, Code
from cni.spec.notes import note
from host.errors import HostError

ERRORS = (CNIError, HostError, OSError, Busy, JournalDamaged)
"""What a step of an ADD or a removal raises on purpose."""


class Undo:
    """Undoes the registered steps, the latest first, if the block is left by an exception.

    The first step that fails ends it, because an address must not be released while an interface
    has it. The journal's entry goes `last`: what could not be undone stays there for the DEL.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[str, Callable[[], object]]] = []
        self._last: Callable[[], object] = lambda: None

    def register(self, what: str, step: Callable[[], object]) -> None:
        """Undo `what` by `step`, before everything that was registered earlier."""
        self._steps.append((what, step))

    def last(self, step: Callable[[], object]) -> None:
        """Undo the journal's entry by `step`, once everything else is undone."""
        self._last = step

    def __enter__(self) -> "Undo":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            return
        with interrupts.held():
            for what, step in (*reversed(self._steps), ("the journal's entry", self._last)):
                try:
                    step()
                except ERRORS as error:
                    note(f"undoing {what}: {error}")
                    return


class Failures:
    """The errors of steps that are all tried."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def of(self, step: Callable[[], object]) -> None:
        """Try a step."""
        try:
            step()
        except ERRORS as error:
            self._texts.append(str(error))

    def __bool__(self) -> bool:
        return bool(self._texts)

    def __str__(self) -> str:
        return "; ".join(self._texts)

    def report(self) -> None:
        """Raise HostError if a step failed."""
        if self._texts:
            raise HostError(str(self))


@contextmanager
def explained() -> Iterator[None]:
    """Errors from below become the runtime's: CNIError 100, 11 or 5."""
    try:
        yield
    except HostError as error:
        raise CNIError(Code.KERNEL, str(error)) from None
    except Busy as error:
        raise CNIError(Code.TRY_AGAIN, str(error)) from None
    except OSError as error:
        raise CNIError(
            Code.IO_FAILURE,
            f"cannot use {error.filename or 'a file'}: {error.strerror}: see that its file system "
            "is mounted, writable and not full, and that the process may open more files",
        ) from None
