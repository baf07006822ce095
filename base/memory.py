"""Where the memory of a process that serves for months is kept, and how it goes back to the kernel.

Python keeps small objects in arenas of 1 MiB, and gives back only an empty one: a single lasting
object that was made among those of a large request keeps all of its arena. glibc can give back
every free page of its heaps. Elsewhere (musl) nothing of this is there.
"""

import ctypes
import os
import sys
from collections.abc import Mapping

# glibc makes eight heaps for each CPU, and each keeps what its threads once needed.
_ALLOCATION = {"PYTHONMALLOC": "malloc", "MALLOC_ARENA_MAX": "2"}

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def allocate_in_glibc(environ: Mapping[str, str] = os.environ) -> None:
    """Begin this process again so that glibc has all of its objects; return if it has them.

    A PYTHONMALLOC that somebody set stays. Before there are threads, and before anything is done.
    """
    if _malloc_trim is None or "PYTHONMALLOC" in environ or not sys.executable:
        return
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**environ, **_ALLOCATION})


def trim() -> None:
    """Give pages that are free by now, wherever they are in the heaps, back to the kernel."""
    if _malloc_trim is not None:
        _malloc_trim(0)
