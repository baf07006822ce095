"""Whether an entry's sandbox still exists, and waiting for a device that a dead one returns."""

from datetime import UTC, datetime, timedelta

import msgspec

from cni.attachments.journal import Journal, JournalEntry, Phase
from host.errors import HostError, NamespaceGone
from host.namespaces import NetworkNamespace, proves_absence

PATIENCE = timedelta(seconds=30)  # for the kernel to tear a namespace down


def lives(entry: JournalEntry, boot_id: str) -> bool:
    """Whether the sandbox of an attachment may still exist."""
    return entry.boot_id == boot_id and namespace_lives(entry)


def namespace_lives(entry: JournalEntry) -> bool:
    """Whether the entry's namespace still exists: at its path, or with a process in it.

    A path that is missing only where we look from (in a container's mounts) proves nothing.
    """
    try:
        with NetworkNamespace.open(entry.netns) as namespace:
            if namespace.identity == entry.netns_identity:
                return True
    except NamespaceGone:
        pass
    try:
        inhabited = NetworkNamespace.find(entry.netns_identity)
    except HostError:
        return True
    if inhabited is None:
        return not proves_absence(entry.netns, entry.netns_seen_from)
    with inhabited:
        return True


def await_return(journal: Journal, entry: JournalEntry, what: str) -> None:
    """Decide about an interface that is neither in the pod nor on the host.

    Its namespace is being torn down, and until it is back its address is in use: HostError. The
    kernel may also have destroyed it with the namespace, so this returns once PATIENCE is over.
    """
    now = datetime.now(UTC)
    if entry.phase is Phase.ATTACHED:
        entry = msgspec.structs.replace(entry, phase=Phase.LEAVING, leaving_since=now.isoformat())
        journal.write(entry)
    if entry.phase is not Phase.LEAVING:
        return
    if now - datetime.fromisoformat(entry.leaving_since) < PATIENCE:
        raise HostError(f"the namespace is gone and {what} has not come back from it yet")
