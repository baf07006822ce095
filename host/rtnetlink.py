"""pyroute2's rtnetlink messages, without the rest of pyroute2.

`import pyroute2` imports all its protocols (119 ms, about 80 modules), and its rtnetlink socket
takes another 60 ms (asyncio, ssl). The message classes alone take 45 ms. A CNI executable pays
for imports in every call, so this module imports the classes without the package's `__init__`. If
pyroute2 was imported as a whole before, that remains.
"""

import importlib.util
import sys

if "pyroute2" not in sys.modules:
    _spec = importlib.util.find_spec("pyroute2")
    assert _spec is not None, "pyroute2 is a dependency of podfabric"
    sys.modules["pyroute2"] = importlib.util.module_from_spec(_spec)

from pyroute2.netlink import nlmsg, nlmsgerr
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg

# linux/rtnetlink.h
RTM_NEWLINK, RTM_DELLINK, RTM_GETLINK, RTM_SETLINK = 16, 17, 18, 19
RTM_NEWADDR, RTM_GETADDR = 20, 22
RTM_NEWROUTE, RTM_GETROUTE = 24, 26
RTM_NEWLINKPROP, RTM_DELLINKPROP = 108, 109

__all__ = [
    "RTM_DELLINK",
    "RTM_DELLINKPROP",
    "RTM_GETADDR",
    "RTM_GETLINK",
    "RTM_GETROUTE",
    "RTM_NEWADDR",
    "RTM_NEWLINK",
    "RTM_NEWLINKPROP",
    "RTM_NEWROUTE",
    "RTM_SETLINK",
    "ifaddrmsg",
    "ifinfmsg",
    "nlmsg",
    "nlmsgerr",
    "rtmsg",
]
