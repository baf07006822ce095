"""One rtnetlink socket for each namespace, and the kernel's errors as ours.

pyroute2 does the messages. A dump that the kernel marks as interrupted (NLM_F_DUMP_INTR) is
repeated by it; what we add is that a refusal says what was tried.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from host.errors import explained
from host.namespaces import NetworkNamespace
from host.rtnetlink import RTM_NEWLINK, IPRoute, NetlinkError, ifinfmsg

__all__ = ["IPRoute", "netlink", "trying"]


class LinkMessage(ifinfmsg):  # type: ignore[misc] # pyroute2's classes are not typed
    """A link message whose hardware addresses are whole.

    pyroute2 reads six bytes of them, which is Ethernet's length; InfiniBand's is 20.
    """

    nla_map = tuple(
        (name, "hex" if name in ("IFLA_ADDRESS", "IFLA_BROADCAST") else kind)
        for name, kind in ifinfmsg.nla_map
    )


# A class inherits its parent's compiled table if that was made first: make ours now.
LinkMessage().compile_nla_table()


@contextmanager
def netlink(namespace: NetworkNamespace | None = None) -> Iterator[IPRoute]:
    """A socket in `namespace`, in the caller's own where none is given.

    The socket is made inside and then driven from here: a netlink socket keeps its namespace.
    """
    if namespace is None:
        route = IPRoute()
    else:
        with namespace.entered():
            route = IPRoute()
    marshal = route.asyncore.marshal
    marshal.msg_map = {**marshal.msg_map, RTM_NEWLINK: LinkMessage}
    try:
        yield route
    finally:
        route.close()


@contextmanager
def trying(what: str, *accepted: int) -> Iterator[None]:
    """Turn the kernel's refusal of `what` into HostError; errnos in `accepted` pass in silence."""
    try:
        yield
    except NetlinkError as error:
        if error.code not in accepted:
            raise explained(what, error.code) from None
