"""What a sweep did: one outcome for each thing that it removed, could not remove, or read."""

from collections.abc import Callable

import msgspec

from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError


class RemovedAttachment(msgspec.Struct, frozen=True):
    """An attachment whose sandbox is gone."""

    attachment: Attachment

    def __str__(self) -> str:
        return f"removed {self.attachment}: its sandbox is gone"


class RemovedStray(msgspec.Struct, frozen=True):
    """A marked interface of the host that no attachment has."""

    interface: str

    def __str__(self) -> str:
        return f'removed stray interface "{self.interface}"'


class SweepFailure(msgspec.Struct, frozen=True):
    """What could not be removed, or None if the whole sweep of a plugin failed; and why."""

    attachment: Attachment | None
    reason: str

    def __str__(self) -> str:
        return f"{self.attachment or 'sweep'}: {self.reason}"


class DamagedFile(msgspec.Struct, frozen=True):
    """A journal file that cannot be read."""

    reason: str

    def __str__(self) -> str:
        return f"{self.reason}: DEL of its attachment will go by the interface's mark"


Outcome = RemovedAttachment | RemovedStray | SweepFailure | DamagedFile
REMOVED = (RemovedAttachment, RemovedStray)


def sweep_all(*sweeps: Callable[[], tuple[Outcome, ...]]) -> tuple[Outcome, ...]:
    """The outcomes of several plugins' sweeps. A sweep that fails does not stop the others.

    Raises the first failure if there is nothing else to report. A damaged file, which every sweep
    meets, is reported once.
    """
    outcomes: dict[Outcome, None] = {}
    failure: CNIError | None = None
    for sweep in sweeps:
        try:
            outcomes |= dict.fromkeys(sweep())
        except CNIError as error:
            failure = failure or error
    if failure is not None and not outcomes:
        raise failure
    if failure is not None:
        outcomes[SweepFailure(None, str(failure))] = None
    return tuple(outcomes)
