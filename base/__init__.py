"""Code for every layer: files, paths, locks, documents.

`paths` names the node's files, `files` writes them so that they survive a kill, `confined` opens
files that a tenant names, `decoding` decodes JSON of any origin, `documents` reads files of an
administrator, and `watching` reports when those change. `locks` and `interrupts` are how calls wait
for each other and how they are ended, `loop` has the threads. `address_text` reads addresses, and
`types` names texts and numbers that are easily confused. `text` makes foreign text printable. Code
for the kernel's network or RDMA devices belongs in `host`.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


def skip_init(package: str) -> None:
    """Let modules of a package be imported without its own `__init__`, which imports all of it."""
    spec = PathFinder.find_spec(package)
    assert spec is not None
    sys.modules.setdefault(package, module_from_spec(spec))


skip_init("netaddr")  # 15 ms of CPU more than for what addresses need
