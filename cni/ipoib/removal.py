"""Undoing an attachment: by DEL, by GC, by a sweep, or by the ADD that follows a killed one.

The interface goes before the addresses, which another pod may have a moment later. Whatever
fails, the rest is done; the journal's entry stays until nothing is left.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import msgspec

from cni.attachments.entry import ADDING, ATTACHED, LEAVING, Attachment, Damaged, Entry
from cni.attachments.journal import Busy, Journal
from cni.attachments.requests import request_of
from cni.ipoib import child
from cni.ipoib.options import ipam_type_of
from cni.spec.errors import CNIError, Code
from cni.spec.gc import valid_attachments
from cni.spec.notes import note
from cni.spec.request import Request
from host.errors import HostError, NamespaceGone
from host.namespaces import NetworkNamespace, view
from host.netlink import netlink
from host.paths import Paths
from ipam.delegation import Ipam

IpamOf = Callable[[Request], Ipam | None]

PATIENCE = timedelta(seconds=30)  # for a namespace's end, which the kernel brings about itself


class Remover:
    """Removes attachments of this plugin; `ipam_of` gives the IPAM plugin of a request."""

    def __init__(self, journal: Journal, paths: Paths, ipam_of: IpamOf) -> None:
        self._journal = journal
        self._paths = paths
        self._ipam_of = ipam_of

    def remove(self, attachment: Attachment, request: Request) -> None:
        """Undo everything of an attachment whose lock is held. Raises CNIError 104 for what failed.

        Where the journal has lost or never had the entry, the request and the child's mark say
        enough.
        """
        failures: list[str] = []
        entry, damage = self._read(attachment)
        if entry is None or entry.boot_id == self._paths.boot_id():
            _try(failures, lambda: self._remove_child(attachment, request, entry))
        if not failures:  # an address in use on an interface must not go to another pod
            _try(failures, lambda: self._release_addresses(request, entry))
        if not failures:
            _try(failures, lambda: self._forget(attachment, damage))
        if failures:
            raise CNIError(
                Code.CLEANUP_INCOMPLETE,
                f"{attachment} is not wholly removed, DEL again: {'; '.join(failures)}",
            )

    def remove_entry(self, entry: Entry) -> None:
        """Undo an attachment, whose lock is held, from its journal alone."""
        self.remove(entry.attachment, request_of(entry))

    def collect(self, request: Request) -> None:
        """Undo what the runtime does not list as valid. Goes on after errors, reports them last."""
        valid = valid_attachments(request.config)
        if valid is None:
            note("GC without cni.dev/valid-attachments: nothing is removed")
            return
        failures: list[str] = []
        for entry in self._journal.entries():
            if isinstance(entry, Damaged):
                note(f"{entry}")  # whose it was is unknown: a DEL will name it
            elif self._mine(entry, request.network) and _key(entry) not in valid:
                _try(failures, lambda entry=entry: self._remove_locked(entry))  # type: ignore[misc]
        _try(failures, remove_strays)
        ipam = self._ipam_of(request)
        if ipam is not None:
            _try(failures, ipam.gc)
        if failures:
            raise CNIError(Code.CLEANUP_INCOMPLETE, "; ".join(failures))

    def sweep(self) -> list[str]:
        """Undo what belongs to no living sandbox, after a reboot or a kill. Says what it did."""
        done: list[str] = []
        for entry in self._journal.entries():
            if isinstance(entry, Damaged):
                done.append(f"{entry}: DEL of its attachment will go by the interface's mark")
                continue
            if not self._mine(entry):
                continue
            try:
                if entry.phase != ADDING and self._lives(entry):
                    continue
                self._remove_locked(entry, timeout=0.0)
                done.append(f"removed {entry.attachment}: its sandbox is gone")
            except Busy:
                continue  # an ADD or DEL is at work on it
            except (CNIError, HostError, OSError, Damaged) as error:
                done.append(f"{entry.attachment}: {error}")
        done += [f'removed stray interface "{name}"' for name in remove_strays()]
        return done

    def _read(self, attachment: Attachment) -> tuple[Entry | None, Damaged | None]:
        try:
            return self._journal.read(attachment), None
        except Damaged as damage:
            note(f"{damage}: going by the request and the interface's mark")
            return None, damage

    def _remove_child(self, attachment: Attachment, request: Request, entry: Entry | None) -> None:
        mac = _noted_mac(entry)
        found = False
        gone = entry is not None
        for path in dict.fromkeys((request.netns, entry.netns if entry else "")):
            if not path:
                continue
            given = request.netns_descriptor if path == request.netns else None
            try:
                with NetworkNamespace.open(path, given) as namespace, netlink(namespace) as pod:
                    own = entry is not None and namespace.identity == entry.netns_identity
                    gone = gone and not own
                    found |= child.remove_from_pod(pod, attachment, mac if own else "")
            except NamespaceGone:
                continue
        with netlink() as host:
            if entry is None or found or not gone:
                child.remove_from_host(host, attachment)
            elif not _removed_from_nameless(attachment, entry, mac) and not (
                child.remove_when_returned(host, attachment, mac, child.RETURN_TIME)
            ):
                self._await_return(entry)

    def _await_return(self, entry: Entry) -> None:
        """The interface is neither in the pod nor on the host: its namespace is being torn down.

        Until it has come back its address is in use. The kernel may also have destroyed it with
        the namespace (before ipoib had netns_refund), so the waiting has an end.
        """
        now = datetime.now(UTC)
        if entry.phase == ATTACHED:
            entry = msgspec.structs.replace(entry, phase=LEAVING, since=now.isoformat())
            self._journal.write(entry)
        if entry.phase == LEAVING and now - datetime.fromisoformat(entry.since) < PATIENCE:
            raise HostError(
                f'the namespace is gone and "{entry.ifname}" has not come back from it yet'
            )

    def _release_addresses(self, request: Request, entry: Entry | None) -> None:
        # The entry knows who gave the addresses, if the request names another plugin by now.
        if entry is not None and ipam_type_of(request) != ipam_type_of(request_of(entry)):
            request = request_of(entry)
        ipam = self._ipam_of(request)
        if ipam is not None:
            ipam.delete()

    def _forget(self, attachment: Attachment, damage: Damaged | None) -> None:
        if damage is not None:
            aside = self._journal.set_aside(attachment)
            note(f"the damaged journal file is kept as {aside}")
        self._journal.remove(attachment)

    def _remove_locked(self, entry: Entry, timeout: float = 10.0) -> None:
        with self._journal.locked(entry.attachment, timeout):
            if self._journal.read(entry.attachment) == entry:  # nobody was faster
                self.remove_entry(entry)

    def _mine(self, entry: Entry, network: str = "") -> bool:
        return entry.plugin == "ipoib" and network in ("", entry.network)

    def _lives(self, entry: Entry) -> bool:
        return entry.boot_id == self._paths.boot_id() and namespace_lives(entry)


def namespace_lives(entry: Entry) -> bool:
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


def _removed_from_nameless(attachment: Attachment, entry: Entry, mac: str) -> bool:
    """Remove the child from a namespace whose path is gone while processes live on in it."""
    found = NetworkNamespace.find(entry.netns_identity)
    if found is None:
        return False
    with found as namespace, netlink(namespace) as pod:
        child.remove_from_pod(pod, attachment, mac)
    return True


def remove_strays() -> list[str]:
    """Delete the children that dead namespaces gave back."""
    with netlink() as host:
        return child.remove_strays(host)


def _noted_mac(entry: Entry | None) -> str:
    try:
        return entry.undo_as(child.Record).mac if entry else ""
    except Damaged:
        return ""


def _key(entry: Entry) -> tuple[str, str]:
    return entry.container_id, entry.ifname


def _try(failures: list[str], step: Callable[[], object]) -> None:
    try:
        step()
    except (CNIError, HostError, OSError, Busy, Damaged) as error:
        failures.append(str(error))
