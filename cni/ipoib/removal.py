"""Taking a child away, wherever it is: in the pod, on the host, in a dying namespace."""

from cni.attachments.entry import JournalDamaged, JournalEntry
from cni.attachments.journal import Journal
from cni.attachments.removal import await_return
from cni.ipoib import child
from cni.spec.attachment import Attachment
from cni.spec.request import Request
from host.errors import NamespaceGone
from host.namespaces import NetworkNamespace
from host.netlink import netlink


class Children:
    """The interfaces of this plugin, as their removal sees them."""

    plugin = "ipoib"

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def take_back(
        self, attachment: Attachment, request: Request, entry: JournalEntry | None
    ) -> None:
        """Delete the attachment's child. HostError while a dying namespace holds it."""
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
                await_return(self._journal, entry, f'"{entry.ifname}"')

    def remove_strays(self) -> list[str]:
        """Delete the children that dead namespaces gave back. Answers their names."""
        with netlink() as host:
            return child.remove_strays(host)


def _removed_from_nameless(attachment: Attachment, entry: JournalEntry, mac: str) -> bool:
    """Remove the child from a namespace whose path is gone while processes live on in it."""
    found = NetworkNamespace.find(entry.netns_identity)
    if found is None:
        return False
    with found as namespace, netlink(namespace) as pod:
        child.remove_from_pod(pod, attachment, mac)
    return True


def _noted_mac(entry: JournalEntry | None) -> str:
    try:
        return entry.undo_as(child.ChildRecord).mac if entry else ""
    except JournalDamaged:
        return ""
