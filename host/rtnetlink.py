"""pyroute2's rtnetlink, without the rest of pyroute2.

`import pyroute2` imports every protocol it speaks: 119 ms and some 80 modules, of which
rtnetlink needs the lesser half (55 ms). A CNI executable pays that on every call, so the package
is entered here without its `__init__`. Whoever imported pyroute2 as a whole before keeps it.
"""

import importlib.util
import sys

if "pyroute2" not in sys.modules:
    _spec = importlib.util.find_spec("pyroute2")
    assert _spec is not None, "pyroute2 is a dependency of podfabric"
    sys.modules["pyroute2"] = importlib.util.module_from_spec(_spec)

from pyroute2.iproute.linux import IPRoute
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.rtnl import RTM_NEWLINK
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

__all__ = ["RTM_NEWLINK", "IPRoute", "NetlinkError", "ifinfmsg"]
