"""Tells whether an attachment's sandbox exists, and which namespaces may have its interface."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import msgspec

from cni.attachments.journal import Journal, JournalEntry, Phase
from cni.spec.request import Request
from host.errors import HostError, NamespaceGone
from host.namespaces import NetworkNamespace, proves_absence
from host.netlink.sockets import Rtnetlink, netlink

PATIENCE = timedelta(seconds=30)  # for the kernel to tear a namespace down


def lives(entry: JournalEntry, boot_id: str) -> bool:
    """Whether the attachment's sandbox may still exist, at its path or with a process inside."""
    if entry.boot_id != boot_id:
        return False
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
    if inhabited is None:  # the path may be missing only in our own mounts
        return not proves_absence(entry.netns, entry.netns_seen_from)
    with inhabited:
        return True


class OpenNamespace(NamedTuple):
    """A namespace that may have an attachment's interface, and a socket in the namespace."""

    namespace: NetworkNamespace
    route: Rtnetlink


@contextmanager
def namespaces_of(request: Request, entry: JournalEntry | None) -> Iterator[list[OpenNamespace]]:
    """The namespaces that may have an attachment's device.

    The sources are paths and running processes.
    """
    with ExitStack() as opened:
        namespaces: list[OpenNamespace] = []

        def keep(namespace: NetworkNamespace) -> None:
            opened.enter_context(namespace)
            route = opened.enter_context(netlink(namespace))  # also sets the identity
            namespaces.append(OpenNamespace(namespace, route))

        for path in filter(None, dict.fromkeys((request.netns, entry.netns if entry else ""))):
            with suppress(NamespaceGone):
                descriptor = request.netns_descriptor if path == request.netns else None
                keep(NetworkNamespace.open(path, descriptor))
        identity = entry.netns_identity if entry else ""
        if identity and identity not in [namespace.identity for namespace, _ in namespaces]:
            nameless = NetworkNamespace.find(identity)
            if nameless is not None:
                keep(nameless)
        yield namespaces


def await_return(journal: Journal, entry: JournalEntry, what: str) -> None:
    """Raise HostError while a dying namespace may still return the interface to the host.

    The interface's address stays in use as long as this function raises. The kernel may also
    destroy the interface, so this function returns once PATIENCE is over.
    """
    now = datetime.now(UTC)
    if entry.phase is Phase.ATTACHED:
        entry = msgspec.structs.replace(entry, phase=Phase.LEAVING, leaving_since=now.isoformat())
        journal.write(entry)
    if entry.phase is not Phase.LEAVING:
        return
    if now - datetime.fromisoformat(entry.leaving_since) < PATIENCE:
        raise HostError(
            f"the pod's network namespace is gone, but {what} is not back on the host yet"
        )
