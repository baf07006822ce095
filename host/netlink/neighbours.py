"""Reads the kernel's table of neighbours, which any process may read."""

import socket

from pyroute2.netlink.rtnl import RTM_GETNEIGH
from pyroute2.netlink.rtnl.ndmsg import (
    NUD_DELAY,
    NUD_PERMANENT,
    NUD_PROBE,
    NUD_REACHABLE,
    NUD_STALE,
)

from host.netlink.messages import NeighbourMessage, attributes, message
from host.netlink.sockets import netlink

_ANSWERED = NUD_REACHABLE | NUD_STALE | NUD_DELAY | NUD_PROBE | NUD_PERMANENT


def answered(interface: str) -> dict[str, str]:
    """The hardware addresses of neighbours on an interface that have answered, by IP address.

    Raises NetlinkError, and OSError if the interface does not exist.
    """
    index = socket.if_nametoindex(interface)
    with netlink() as route:
        table = route.table(RTM_GETNEIGH, message(NeighbourMessage))
    found = [(each, attributes(each)) for each in table]
    return {
        named["NDA_DST"]: named["NDA_LLADDR"]
        for each, named in found
        if each["ifindex"] == index and each["state"] & _ANSWERED and "NDA_LLADDR" in named
    }
