"""Allocates and frees at random, in all ways; run with a seed, and numbers of calls and threads.

Ends with 0 if every call was answered with success or "out of memory", and all could be freed.
"""

import ctypes
import random
import struct
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

MIB = 1 << 20
GRANULE = 2 * MIB
OUT_OF_MEMORY = 2
UNTOUCHED = 0x1234

cuda = ctypes.CDLL("libcuda.so.1")


def number(value: int) -> c_uint64:
    return c_uint64(value)


def call(symbol: str, *arguments: object) -> int:
    return int(cuda[symbol](*arguments))


def do(symbol: str, *arguments: object) -> None:
    result = call(symbol, *arguments)
    if result != 0:
        raise SystemExit(f"{symbol} answered {result}")


def made(symbol: str, *arguments: object) -> int | None:
    """A handle, or None where there is no memory: then what it would be in is as before."""
    handle = c_uint64(UNTOUCHED)
    result = call(symbol, byref(handle), *arguments)
    if result == OUT_OF_MEMORY:
        if handle.value != UNTOUCHED:
            raise SystemExit(f"{symbol} wrote {handle.value} though it failed")
        return None
    if result != 0:
        raise SystemExit(f"{symbol} answered {result}")
    return handle.value


Freeing = Callable[[], None]


class Calls:
    """What is allocated now, as what frees it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.held: list[Freeing] = []
        context = c_void_p()
        do("cuInit", 0)
        do("cuDevicePrimaryCtxRetain", byref(context), 0)
        do("cuCtxSetCurrent", context)
        self.pool = made("cuMemPoolCreate", struct.pack("@4iQQ56x", 1, 0, 1, 0, 0, 0))
        self.ways: list[Callable[[], Freeing | None]] = [self.linear, self.managed, self.rows]
        self.ways += [self.async_, self.pooled, self.physical, self.mapped, self.array]

    def bytes(self) -> int:
        return self.random.choice((1, 511, 65536, MIB, GRANULE, self.random.randrange(1, 24 * MIB)))

    def run(self, count: int) -> None:
        for _ in range(count):
            if self.held and self.random.random() < 0.5:
                self.held.pop(self.random.randrange(len(self.held)))()
            else:
                freeing = self.random.choice(self.ways)()
                if freeing is not None:
                    self.held.append(freeing)
            if self.random.random() < 0.02:
                do("cuCtxSynchronize")
                free, total = c_size_t(), c_size_t()
                do("cuMemGetInfo_v2", byref(free), byref(total))
        while self.held:
            self.held.pop()()
        do("cuCtxSynchronize")
        do("cuMemPoolDestroy", number(self.pool or 0))
        do("cuMemGetInfo_v2", byref(c_size_t()), byref(c_size_t()))

    def freed(self, symbol: str, handle: int | None, *further: object) -> Freeing | None:
        return None if handle is None else lambda: do(symbol, number(handle), *further)

    def linear(self) -> Freeing | None:
        return self.freed("cuMemFree_v2", made("cuMemAlloc_v2", number(self.bytes())))

    def managed(self) -> Freeing | None:
        return self.freed("cuMemFree_v2", made("cuMemAllocManaged", number(self.bytes()), c_int(1)))

    def rows(self) -> Freeing | None:
        pitch, height = c_size_t(), self.random.randrange(1, 20000)
        width = self.random.randrange(1, 2000)
        handle = made("cuMemAllocPitch_v2", byref(pitch), number(width), number(height), 4)
        return self.freed("cuMemFree_v2", handle)

    def async_(self) -> Freeing | None:
        handle = made("cuMemAllocAsync", number(self.bytes()), None)
        if self.random.random() < 0.2:
            return self.freed("cuMemFree_v2", handle)
        return self.freed("cuMemFreeAsync", handle, None)

    def pooled(self) -> Freeing | None:
        handle = made("cuMemAllocFromPoolAsync", number(self.bytes()), number(self.pool or 0), None)
        return self.freed("cuMemFreeAsync", handle, None)

    def physical(self) -> Freeing | None:
        size = self.random.randrange(1, 8) * GRANULE
        properties = struct.pack("@4iQQ", 1, 1, 1, 0, 0, 0)
        return self.freed("cuMemRelease", made("cuMemCreate", number(size), properties, number(0)))

    def mapped(self) -> Freeing | None:
        """Memory that lives only by its mapping."""
        properties = struct.pack("@4iQQ", 1, 1, 1, 0, 0, 0)
        handle = made("cuMemCreate", number(GRANULE), properties, number(0))
        if handle is None:
            return None
        none = number(0)
        address = made("cuMemAddressReserve", number(GRANULE), none, none, none) or 0
        do("cuMemMap", number(address), number(GRANULE), none, number(handle), none)
        do("cuMemRelease", number(handle))

        def free() -> None:
            do("cuMemUnmap", number(address), number(GRANULE))
            do("cuMemAddressFree", number(address), number(GRANULE))

        return free

    def array(self) -> Freeing | None:
        width, height = self.random.randrange(1, 2000), self.random.randrange(0, 2000)
        described = struct.pack("@3QiII4x", width, height, 0, 0x20, 4, 0)
        if self.random.random() < 0.5:
            levels = self.random.randrange(1, 10)
            handle = made("cuMipmappedArrayCreate", described, levels)
            return self.freed("cuMipmappedArrayDestroy", handle)
        return self.freed("cuArrayDestroy", made("cuArray3DCreate_v2", described))


def main() -> None:
    seed, count, threads = map(int, sys.argv[1:])

    def run(number: int) -> None:
        Calls(seed * 100 + number).run(count // threads)

    with ThreadPoolExecutor(threads) as executor:
        for done in [executor.submit(run, number) for number in range(threads)]:
            done.result()


if __name__ == "__main__":
    main()
