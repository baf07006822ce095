"""Capabilities of the current thread (capabilities(7))."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3: two sets of 32
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Set(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]


@contextmanager
def without_dac_override() -> Iterator[None]:
    """Access files as root without CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""
    header, sets = (ctypes.c_uint32 * 2)(_VERSION, 0), (_Set * 2)()
    _call("capget", header, sets)
    before = sets[0].effective
    sets[0].effective = before & ~(1 << _DAC_OVERRIDE | 1 << _DAC_READ_SEARCH)
    _call("capset", header, sets)
    try:
        yield
    finally:
        sets[0].effective = before
        _call("capset", header, sets)


def _call(name: str, *arguments: object) -> None:
    if _LIBC[name](*arguments) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
