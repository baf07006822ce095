"""Code that every layer uses.

Code for the kernel's network or RDMA devices belongs in `host`.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


def skip_init(package: str) -> None:
    """Make later imports of a package's modules skip the package's `__init__`."""
    spec = PathFinder.find_spec(package)
    assert spec is not None
    sys.modules.setdefault(package, module_from_spec(spec))


skip_init("netaddr")  # its `__init__` would cost 15 ms of CPU
