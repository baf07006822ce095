"""Keeps the memory of a process that runs for months small, by returning free pages to the kernel.

Python keeps small objects in arenas of 1 MiB and frees an arena only when it is empty: a single
lasting object that was created during a large request keeps its whole arena. glibc can return
every free page of its heaps. Other C libraries (musl) cannot; these functions then do nothing.
"""

import ctypes
import os
import sys
from collections.abc import Mapping

# By default glibc has eight heaps for each CPU, and each keeps what its threads once needed.
_ALLOCATION = {"PYTHONMALLOC": "malloc", "MALLOC_ARENA_MAX": "2"}

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def allocate_in_glibc(environ: Mapping[str, str] = os.environ) -> None:
    """Run this program again with all Python objects in glibc's heaps, unless that is done.

    A PYTHONMALLOC in the environment is respected. Call this first, before threads exist.
    """
    if _malloc_trim is None or "PYTHONMALLOC" in environ or not sys.executable:
        return
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**environ, **_ALLOCATION})


def trim() -> None:
    """Return the free pages of all heaps to the kernel (malloc_trim(3))."""
    if _malloc_trim is not None:
        _malloc_trim(0)
