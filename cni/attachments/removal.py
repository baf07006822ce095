"""Undoing an attachment: by DEL, by GC, by a sweep, or by the ADD that follows a killed one.

The interface goes before the addresses, which another pod may have a moment later. Whatever
fails, the rest is done; the journal's entry stays until nothing is left.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Protocol

import msgspec

from base.locks import Busy
from base.paths import Paths
from cni.attachments.entry import ADDING, ATTACHED, LEAVING, JournalDamaged, JournalEntry
from cni.attachments.journal import Journal
from cni.attachments.requests import ipam_at_add, request_of
from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError, Code
from cni.spec.gc import valid_attachments
from cni.spec.ipam import ipam_of
from cni.spec.notes import note
from cni.spec.request import Request
from host.errors import HostError, NamespaceGone
from host.namespaces import NetworkNamespace, view

PATIENCE = timedelta(seconds=30)  # for a namespace's end, which the kernel brings about itself


class Addresses(Protocol):
    """The IPAM plugin of a request, as far as removals need it."""

    def delete(self) -> None:
        """Release what the request's attachment holds."""

    def gc(self) -> None:
        """Release what belongs to no valid attachment."""


IpamOf = Callable[[Request, bool | None], Addresses | None]
"""The IPAM plugin of a type for a request; whether an ADD ran it, None if that cannot be told."""


class Interfaces(Protocol):
    """What is particular to the interfaces of one plugin."""

    plugin: str

    def take_back(
        self, attachment: Attachment, request: Request, entry: JournalEntry | None
    ) -> None:
        """Remove or restore an attachment's interface, whatever of it is left; again is fine.

        Where the journal has lost or never had the entry, the request must say enough.
        """

    def remove_strays(self) -> list[str]:
        """Remove marked interfaces of the host that no attachment has. Answers their names."""


class Remover:
    """Removes attachments of one plugin; `ipam_of` gives the IPAM plugin for that."""

    def __init__(
        self, interfaces: Interfaces, journal: Journal, paths: Paths, ipam_of: IpamOf
    ) -> None:
        self._interfaces = interfaces
        self._journal = journal
        self._paths = paths
        self._ipam_of = ipam_of

    def remove(self, attachment: Attachment, request: Request) -> None:
        """Undo everything of an attachment whose lock is held. Raises CNIError 104 for what failed.

        Where the journal has lost or never had the entry, the request and the interface's mark
        say enough.
        """
        failures: list[str] = []
        entry, damage = self._read(attachment)
        if entry is None or entry.boot_id == self._paths.boot_id():
            _try(failures, lambda: self._interfaces.take_back(attachment, request, entry))
        if not failures:  # an address in use on an interface must not go to another pod
            _try(failures, lambda: self._release_addresses(request, entry, damage))
        if not failures:
            _try(failures, lambda: self._forget(attachment, damage))
        if failures:
            raise CNIError(
                Code.CLEANUP_INCOMPLETE,
                f"{attachment} is not wholly removed, DEL again: {'; '.join(failures)}",
            )

    def remove_entry(self, entry: JournalEntry) -> None:
        """Undo an attachment, whose lock is held, from its journal alone."""
        self.remove(entry.attachment, request_of(entry))

    def settle_earlier_attempt(self, attachment: Attachment, request: Request) -> None:
        """Undo what a killed ADD of this very attachment left; CNIError 103 if it completed.

        Completed or not, what an agent made for this very call before it died is undone: a
        runtime that was not answered knows nothing of it.
        """
        try:
            entry = self._journal.read(attachment)
        except JournalDamaged as damage:
            raise CNIError(
                Code.JOURNAL_DAMAGED, f"{damage}: run DEL for this attachment, then ADD again"
            ) from None
        if entry is None:
            return
        living = entry.phase == ATTACHED and lives(entry, self._paths.boot_id())
        if living and not _is_of_call(entry, request):
            raise CNIError(
                Code.ALREADY_ATTACHED,
                f'"{attachment.ifname}" of container {attachment.container_id} is attached to '
                f'"{attachment.network}" since {entry.since}: run DEL before another ADD',
            )
        self.remove_entry(entry)

    def collect(self, request: Request) -> None:
        """Undo what the runtime does not list as valid. Goes on after errors, reports them last."""
        valid = valid_attachments(request.config)
        if valid is None:
            note("GC without cni.dev/valid-attachments: nothing is removed")
            return
        failures: list[str] = []
        added = []
        for entry in self._journal.entries():
            if isinstance(entry, JournalDamaged):
                note(f"{entry}")  # whose it was is unknown: a DEL will name it
            elif self._mine(entry, request.network):
                added.append(ipam_at_add(entry))
                if _key(entry) not in valid:
                    _try(failures, lambda entry=entry: self._remove_locked(entry))  # type: ignore[misc]
        _try(failures, self._interfaces.remove_strays)
        ipam = self._ipam_of(request, ipam_of(request) in added)
        if ipam is not None:
            _try(failures, ipam.gc)
        if failures:
            raise CNIError(Code.CLEANUP_INCOMPLETE, "; ".join(failures))

    def sweep(self) -> list[str]:
        """Undo what belongs to no living sandbox, after a reboot or a kill. Says what it did."""
        done: list[str] = []
        for entry in self._journal.entries():
            if isinstance(entry, JournalDamaged):
                done.append(f"{entry}: DEL of its attachment will go by the interface's mark")
                continue
            if not self._mine(entry):
                continue
            try:
                if entry.phase != ADDING and lives(entry, self._paths.boot_id()):
                    continue
                self._remove_locked(entry, timeout=0.0)
                done.append(f"removed {entry.attachment}: its sandbox is gone")
            except Busy:
                continue  # an ADD or DEL is at work on it
            except (CNIError, HostError, OSError, JournalDamaged) as error:
                done.append(f"{entry.attachment}: {error}")
        done += [f'removed stray interface "{name}"' for name in self._interfaces.remove_strays()]
        return done

    def _read(self, attachment: Attachment) -> tuple[JournalEntry | None, JournalDamaged | None]:
        try:
            return self._journal.read(attachment), None
        except JournalDamaged as damage:
            note(f"{damage}: going by the request and the interface's mark")
            return None, damage

    def _release_addresses(
        self, request: Request, entry: JournalEntry | None, damage: JournalDamaged | None
    ) -> None:
        # The entry knows who gave the addresses, if the request says something else by now.
        if entry is not None and ipam_of(request) != ipam_at_add(entry):
            request = request_of(entry)
        added = None if damage is not None else entry is not None
        ipam = self._ipam_of(request, added)
        if ipam is not None:
            ipam.delete()

    def _forget(self, attachment: Attachment, damage: JournalDamaged | None) -> None:
        if damage is not None:
            aside = self._journal.set_aside(attachment)
            note(f"the damaged journal file is kept as {aside}")
        self._journal.remove(attachment)

    def _remove_locked(self, entry: JournalEntry, timeout: float = 10.0) -> None:
        with self._journal.locked(entry.attachment, timeout):
            if self._journal.read(entry.attachment) == entry:  # nobody was faster
                self.remove_entry(entry)

    def _mine(self, entry: JournalEntry, network: str = "") -> bool:
        return entry.plugin == self._interfaces.plugin and network in ("", entry.network)


def sweep_all(*sweeps: Callable[[], list[str]]) -> list[str]:
    """The sweeps of several plugins: one that fails does not keep the others from theirs.

    Raises the first failure at the end. What several tell, a damaged file, is told once.
    """
    done: dict[str, None] = {}
    failure: CNIError | None = None
    for sweep in sweeps:
        try:
            done |= dict.fromkeys(sweep())
        except CNIError as error:
            failure = failure or error
    if failure is not None and not done:
        raise failure
    if failure is not None:
        done[f"sweep: {failure}"] = None
    return list(done)


def lives(entry: JournalEntry, boot_id: str) -> bool:
    """Whether the sandbox of an attachment may still be there."""
    return entry.boot_id == boot_id and namespace_lives(entry)


def namespace_lives(entry: JournalEntry) -> bool:
    """Whether the entry's namespace is still there: at its path, or with a process in it.

    A path may be missing only from where we look (a container's mounts): that proves nothing.
    """
    try:
        with NetworkNamespace.open(entry.netns) as namespace:
            if namespace.identity == entry.netns_identity:
                return True
    except NamespaceGone:
        pass
    try:
        found = NetworkNamespace.find(entry.netns_identity)
    except HostError:
        return True
    if found is None:
        return entry.netns_seen_from != view()
    with found:
        return True


def await_return(journal: Journal, entry: JournalEntry, what: str) -> None:
    """It is neither in the pod nor on the host: its namespace is being torn down.

    Until it has come back its address is in use: HostError. The kernel may also have destroyed
    it with the namespace, so the waiting has an end, when this returns.
    """
    now = datetime.now(UTC)
    if entry.phase == ATTACHED:
        entry = msgspec.structs.replace(entry, phase=LEAVING, since=now.isoformat())
        journal.write(entry)
    if entry.phase == LEAVING and now - datetime.fromisoformat(entry.since) < PATIENCE:
        raise HostError(f"the namespace is gone and {what} has not come back from it yet")


def _is_of_call(entry: JournalEntry, request: Request) -> bool:
    """Whether an agent made it in the place of this very call, and died."""
    since = request.unanswered_since
    return since is not None and datetime.fromisoformat(entry.since).timestamp() >= since


def _key(entry: JournalEntry) -> tuple[str, str]:
    return entry.container_id, entry.ifname


def _try(failures: list[str], step: Callable[[], object]) -> None:
    try:
        step()
    except (CNIError, HostError, OSError, Busy, JournalDamaged) as error:
        failures.append(str(error))
