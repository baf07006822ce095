"""What every layer may use: files, paths, locks, documents.

`paths` names the node's files, `files` writes them so that they survive a kill, `confined` opens
files that a tenant names, `decoding` decodes JSON that anybody may have written, `documents` reads
files of an administrator, and `watching` reports when those change. `locks` and `interrupts` are
how calls wait for each other and how they are ended, `loop` is how threads go on. `address_text`
reads addresses, and `types` has names for texts and numbers that are easily mistaken. `text` makes
foreign text printable. Code that touches the kernel's network or RDMA devices belongs in `host`.
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
