"""Keeps the memory of a process that runs for months small, by returning free pages to the kernel.

Python keeps small objects in arenas of 1 MiB and frees an arena only when it is empty: a single
lasting object that was created during a large request keeps its whole arena. glibc can return
every free page of its heaps, and Python uses these where PYTHONMALLOC is "malloc", as the image and
the unit file say. Other C libraries (musl) cannot: `trim` then does nothing.
"""

from collections.abc import Callable
from functools import cache


def trim() -> None:
    """Return all free pages to the kernel, wherever they are in the heaps."""
    _malloc_trim()(0)


@cache
def _malloc_trim() -> Callable[[int], object]:
    import ctypes  # not needed before the first large request has ended

    trim: Callable[[int], object] = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)
    return trim
