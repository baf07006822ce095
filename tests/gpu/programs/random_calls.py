"""Allocates and frees at random, in all ways; run with a seed, and numbers of calls and threads.

Ends with 0 if every call was answered with success or "out of memory", and all could be freed.
"""

import ctypes
import os
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
ON_GPU = (1, 1, 1, 0)  # pinned, shared by files, on a device: the first
PINNED = struct.pack("@4iQQ", *ON_GPU, 0, 0)

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
    """The new handle, or `None` if the call runs out of memory. The call must not write a handle
    then.
    """
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
    """Random calls. `held` has the call that frees each current allocation."""

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
        self.ways += [self.of_context, self.of_graph]
        self.ways += [self.retained, self.imported, self.pieces, self.side_by_side]

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
                do(self.random.choice(("cuDeviceGraphMemTrim", "cuCtxSynchronize")), 0)
                free, total = c_size_t(), c_size_t()
                do("cuMemGetInfo_v2", byref(free), byref(total))
        while self.held:
            self.held.pop()()
        do("cuCtxSynchronize")
        do("cuDeviceGraphMemTrim", 0)
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
        variant = self.variant()
        handle = made(f"cuMemAllocAsync{variant}", number(self.bytes()), None)
        if self.random.random() < 0.2:
            return self.freed("cuMemFree_v2", handle)
        return self.freed(f"cuMemFreeAsync{variant}", handle, None)

    def variant(self) -> str:
        """Of functions that take a stream: whose default stream it is."""
        return self.random.choice(("", "_ptsz"))

    def pooled(self) -> Freeing | None:
        variant, pool = self.variant(), number(self.pool or 0)
        handle = made(f"cuMemAllocFromPoolAsync{variant}", number(self.bytes()), pool, None)
        return self.freed(f"cuMemFreeAsync{variant}", handle, None)

    def array(self) -> Freeing | None:
        width, height = self.random.randrange(1, 2000), self.random.randrange(0, 2000)
        described = struct.pack("@3QiII4x", width, height, 0, 0x20, 4, 0)
        if self.random.random() < 0.5:
            levels = self.random.randrange(1, 10)
            handle = made("cuMipmappedArrayCreate", described, levels)
            return self.freed("cuMipmappedArrayDestroy", handle)
        return self.freed("cuArrayDestroy", made("cuArray3DCreate_v2", described))

    def of_context(self) -> Freeing | None:
        """Allocate memory in a new context. The end of the context frees the memory."""
        symbol = self.random.choice(("cuCtxCreate", "cuCtxCreate_v2"))
        context = made(symbol, 0, 0)
        for _ in range(self.random.randrange(4)):
            made("cuMemAlloc_v2", number(self.bytes()))
            made("cuArrayCreate_v2", struct.pack("@2QiI", 100, 300, 0x20, 4))
        do("cuCtxPopCurrent_v2", byref(c_void_p()))
        return self.freed(self.random.choice(("cuCtxDestroy", "cuCtxDestroy_v2")), context)

    def of_graph(self) -> Freeing | None:
        """A graph's memory, which it has from its launch on until it is freed."""
        graph = made("cuGraphCreate", 0) or 0
        described = struct.pack("@4iQQ56x4Q", *ON_GPU, 0, 0, 0, 0, self.bytes(), 0)
        node = ctypes.create_string_buffer(described, len(described))
        made("cuGraphAddMemAllocNode", number(graph), None, number(0), node)
        executable = self.executable(graph)
        if executable is None:
            do("cuGraphDestroy", number(graph))
            return None
        result = call(f"cuGraphLaunch{self.variant()}", number(executable), None)
        if result not in (0, OUT_OF_MEMORY):
            raise SystemExit(f"a launch answered {result}")

        def free() -> None:
            if result == 0:
                do("cuMemFreeAsync", number(struct.unpack("@Q", node.raw[112:120])[0]), None)
            do("cuGraphExecDestroy", number(executable))
            do("cuGraphDestroy", number(graph))

        return free

    def executable(self, graph: int) -> int | None:
        """Of a graph, which may be uploaded at once, or in a call of its own, or not."""
        how = self.random.randrange(3)
        if how == 0:
            uploads = struct.pack("@3Qi4x", 2, 0, 0, 0)
            symbol = f"cuGraphInstantiateWithParams{self.variant()}"
            return made(symbol, number(graph), ctypes.create_string_buffer(uploads, len(uploads)))
        executable = made("cuGraphInstantiateWithFlags", number(graph), number(0)) or 0
        if how == 1 and call(f"cuGraphUpload{self.variant()}", number(executable), None) != 0:
            do("cuGraphExecDestroy", number(executable))
            return None
        return executable

    # ---- physical memory ---------------------------------------------------------------------

    def created(self, granules: int) -> int | None:
        return made("cuMemCreate", number(granules * GRANULE), PINNED, number(0))

    def mapping(self, *handles: int) -> int:
        """The address where these are mapped side by side, a granule of each, and released."""
        none, size = number(0), number(len(handles) * GRANULE)
        address = made("cuMemAddressReserve", size, none, none, none) or 0
        for place, handle in enumerate(handles):
            at = number(address + place * GRANULE)
            do("cuMemMap", at, number(GRANULE), none, number(handle), none)
        for handle in handles:
            do("cuMemRelease", number(handle))
        return address

    def unmapped(self, address: int, granules: int) -> None:
        do("cuMemUnmap", number(address), number(granules * GRANULE))
        do("cuMemAddressFree", number(address), number(granules * GRANULE))

    def physical(self) -> Freeing | None:
        return self.freed("cuMemRelease", self.created(self.random.randrange(1, 8)))

    def mapped(self) -> Freeing | None:
        """Memory that lives only by its mapping."""
        handle = self.created(1)
        if handle is None:
            return None
        address = self.mapping(handle)
        return lambda: self.unmapped(address, 1)

    def retained(self) -> Freeing | None:
        """Memory that was mapped, and lives by the handle that its address told."""
        handle = self.created(self.random.randrange(1, 4))
        if handle is None:
            return None
        address = self.mapping(handle)
        again = made("cuMemRetainAllocationHandle", number(address))
        self.held.append(lambda: self.unmapped(address, 1))
        return self.freed("cuMemRelease", again)

    def imported(self) -> Freeing | None:
        """Memory that has been exported and imported here: it lives until both are released."""
        handle, file = self.created(self.random.randrange(1, 4)), c_int()
        if handle is None:
            return None
        do("cuMemExportToShareableHandle", byref(file), number(handle), 1, number(0))
        again = made("cuMemImportFromShareableHandle", number(file.value), 1)
        os.close(file.value)
        self.held.append(lambda: do("cuMemRelease", number(handle)))
        return self.freed("cuMemRelease", again)

    def pieces(self) -> Freeing | None:
        """Memory that is mapped in pieces, of which each is unmapped for itself."""
        count = self.random.randrange(2, 5)
        handle = self.created(count)
        if handle is None:
            return None
        none, left = number(0), [count]
        address = made("cuMemAddressReserve", number(count * GRANULE), none, none, none) or 0

        def piece(place: int) -> Freeing:
            at = number(address + place * GRANULE)
            do("cuMemMap", at, number(GRANULE), number(place * GRANULE), number(handle), none)
            return lambda: unmap(at)

        def unmap(at: c_uint64) -> None:
            do("cuMemUnmap", at, number(GRANULE))
            left[0] -= 1
            if left[0] == 0:
                do("cuMemAddressFree", number(address), number(count * GRANULE))

        self.held += [piece(place) for place in range(count)]
        return self.freed("cuMemRelease", handle)

    def side_by_side(self) -> Freeing | None:
        """Memory of two handles that is unmapped by one call."""
        first, second = self.created(1), self.created(2)
        if first is None or second is None:
            return self.freed("cuMemRelease", first if second is None else second)
        address = self.mapping(first, second)
        return lambda: self.unmapped(address, 2)


def main() -> None:
    seed, count, threads = map(int, sys.argv[1:])

    def run(number: int) -> None:
        Calls(seed * 100 + number).run(count // threads)

    with ThreadPoolExecutor(threads) as executor:
        for done in [executor.submit(run, number) for number in range(threads)]:
            done.result()


if __name__ == "__main__":
    main()
