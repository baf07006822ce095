"""The sweep: removes what belongs to no living sandbox, after a reboot or a kill.

It answers one outcome for each thing that it removed, could not remove, or could not read.
"""

import msgspec

from base.locks import Busy
from cni.attachments.journal import JournalDamaged, JournalEntry, Phase
from cni.attachments.lifecycle import ERRORS, InterfacePlugin, explained
from cni.attachments.sandbox import lives
from cni.spec.errors import CNIError
from ipam.plugin import AddressPlugin


class Outcome(msgspec.Struct, frozen=True):
    """What a sweep removed, or what it could not remove or read, and why."""

    text: str
    removed: bool = True

    def __str__(self) -> str:
        return self.text


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
            # A power cut may bring back reservations whose DEL had released them.
            for each in addresses.release_stale():
                text = f"released {each.address} of {each.holder}: reserved in an earlier boot"
                outcomes[Outcome(text)] = None
        except CNIError as error:
            failure = failure or error
    if failure is not None and not outcomes:
        raise failure
    if failure is not None:
        outcomes[Outcome(f"sweep: {failure}", removed=False)] = None
    return tuple(outcomes)


def sweep(plugin: InterfacePlugin) -> tuple[Outcome, ...]:
    """Remove the plugin's attachments without a living sandbox, and strays. Raises CNIError."""
    outcomes: list[Outcome] = []
    with explained():
        boot_id = plugin.paths.boot_id()
        plugin.journal.remove_unfinished()
        for entry in plugin.journal.entries():
            if isinstance(entry, JournalDamaged):
                text = f"{entry}: DEL of its attachment will go by the interface's mark"
                outcomes.append(Outcome(text, removed=False))
            elif entry.plugin == plugin.name:
                outcome = _sweep_entry(plugin, entry, boot_id)
                outcomes += [outcome] if outcome is not None else []
        for name in plugin.remove_strays():
            outcomes.append(Outcome(f'removed stray interface "{name}"'))
    return tuple(outcomes)


def _sweep_entry(plugin: InterfacePlugin, entry: JournalEntry, boot_id: str) -> Outcome | None:
    try:
        if entry.phase is not Phase.ADDING and lives(entry, boot_id):
            return None
        plugin.remove_locked(entry, timeout=0.0)
    except Busy:
        return None  # an ADD or DEL of it is running
    except ERRORS as error:
        return Outcome(f"{entry.attachment}: {error}", removed=False)
    return Outcome(f"removed {entry.attachment}: its sandbox is gone")
