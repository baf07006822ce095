"""Code that every layer uses.

`paths` names the node's files. `files` writes files so that they survive a kill. `confined` opens
files that a tenant names. `decoding` decodes JSON of any origin. `documents` reads files of an
administrator, and `watching` reports their changes. Calls wait for each other in `locks`, and
`interrupts` ends them early. `loop` has threads that repeat a step. `address_text` parses
addresses. `types` has types for texts and numbers that are easily confused. `text` makes foreign
text printable. Code for the kernel's network or RDMA devices belongs in `host`.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


def skip_init(package: str) -> None:
    """Let modules of a package be imported without its `__init__`, which would import the whole
    package.
    """
    spec = PathFinder.find_spec(package)
    assert spec is not None
    sys.modules.setdefault(package, module_from_spec(spec))


skip_init("netaddr")  # its `__init__` would cost 15 ms of CPU
