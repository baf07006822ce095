"""Keeps the memory of a process that runs for months small, by returning free pages to the kernel.

Python keeps small objects in arenas of 1 MiB and frees an arena only when it is empty: a single
lasting object that was created during a large request keeps its whole arena. glibc can return
every free page of its heaps. Other C libraries (musl) cannot; these functions then do nothing.
"""

import os
import sys
from collections.abc import Callable, Mapping
from functools import cache

# By default glibc has eight heaps for each CPU, and each keeps what its threads once needed.
_ALLOCATION = {"PYTHONMALLOC": "malloc", "MALLOC_ARENA_MAX": "2"}


def allocate_in_glibc(environ: Mapping[str, str] = os.environ) -> None:
    """Restart this process so that Python allocates with glibc; return if that is decided.

    Whoever sets PYTHONMALLOC decides, also for another allocator. To be called before other
    imports, which the restarted process does again, and before there are threads.
    """
    glibc = "CS_GNU_LIBC_VERSION" in os.confstr_names
    if not glibc or "PYTHONMALLOC" in environ or not sys.executable:
        return
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**environ, **_ALLOCATION})


def trim() -> None:
    """Return all free pages to the kernel, wherever they are in the heaps."""
    _malloc_trim()(0)


@cache
def _malloc_trim() -> Callable[[int], object]:
    import ctypes  # not needed before the first large request has ended

    trim: Callable[[int], object] = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)
    return trim
