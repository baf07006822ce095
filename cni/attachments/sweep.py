"""The sweep: removes what belongs to no living sandbox, after a reboot or a kill.

It answers one outcome for each thing that it removed, could not remove, or could not read.
"""

from collections.abc import Iterator

import msgspec

from base.locks import Busy
from cni.attachments.journal import JournalDamaged, JournalEntry, Phase
from cni.attachments.lifecycle import ERRORS, InterfacePlugin, explained
from cni.attachments.sandbox import lives
from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError
from ipam.plugin import AddressPlugin


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


class ReleasedAddress(msgspec.Struct, frozen=True):
    """An address that has been held since an earlier boot."""

    address: str
    holder: str

    def __str__(self) -> str:
        return f"released {self.address} of {self.holder}: reserved in an earlier boot"


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


Outcome = RemovedAttachment | RemovedStray | ReleasedAddress | SweepFailure | DamagedFile
REMOVED = (RemovedAttachment, RemovedStray, ReleasedAddress)


def sweep_all(addresses: AddressPlugin, *plugins: InterfacePlugin) -> tuple[Outcome, ...]:
    """The outcomes of several plugins' sweeps, and then of the addresses of earlier boots.

    A sweep that fails does not stop the others.

    Raises the first failure if there is nothing else to report. A damaged file, which every sweep
    meets, is reported once.
    """
    outcomes: dict[Outcome, None] = {}
    failure: CNIError | None = None
    for plugin in plugins:
        try:
            outcomes |= dict.fromkeys(sweep(plugin))
        except CNIError as error:
            failure = failure or error
    # A node without this directory has no store, and a look would make one.
    if any(plugin.paths.ipam.is_dir() for plugin in plugins):
        try:
            outcomes |= dict.fromkeys(_release_stale(addresses))
        except CNIError as error:
            failure = failure or error
    if failure is not None and not outcomes:
        raise failure
    if failure is not None:
        outcomes[SweepFailure(None, str(failure))] = None
    return tuple(outcomes)


def sweep(plugin: InterfacePlugin) -> tuple[Outcome, ...]:
    """Remove the plugin's attachments without a living sandbox, and strays. Raises CNIError."""
    outcomes: list[Outcome] = []
    with explained():
        boot_id = plugin.paths.boot_id()
        plugin.journal.remove_unfinished()
        for entry in plugin.journal.entries():
            if isinstance(entry, JournalDamaged):
                outcomes.append(DamagedFile(str(entry)))
            elif entry.plugin == plugin.name:
                outcome = _sweep_entry(plugin, entry, boot_id)
                outcomes += [outcome] if outcome is not None else []
        outcomes += map(RemovedStray, plugin.remove_strays())
    return tuple(outcomes)


def _release_stale(addresses: AddressPlugin) -> Iterator[ReleasedAddress]:
    """A power cut may bring back reservations whose DEL had released them."""
    for reservation in addresses.release_stale():
        yield ReleasedAddress(reservation.address, reservation.holder)


def _sweep_entry(plugin: InterfacePlugin, entry: JournalEntry, boot_id: str) -> Outcome | None:
    try:
        if entry.phase is not Phase.ADDING and lives(entry, boot_id):
            return None
        plugin.remove_locked(entry, timeout=0.0)
    except Busy:
        return None  # an ADD or DEL of it is running
    except ERRORS as error:
        return SweepFailure(entry.attachment, str(error))
    return RemovedAttachment(entry.attachment)
