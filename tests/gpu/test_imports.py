"""A process opens memory of another process: the memory counts for the process that made it, and as
an import of the process that opens it.
"""

from collections.abc import Callable

import msgspec
import pytest

from tests.gpu.conftest import MIB, Place
from tests.gpu.forms import on_device, pool_on
from tests.standin.driver import Answer, Driver, Out, packed

NOT_SUPPORTED = 801
FILE = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, and an external memory's opaque one
LAZY_PEER_ACCESS = 1
Make = Callable[..., Place]


class Import(msgspec.Struct, frozen=True):
    """A way to open memory of 4 MiB of another process, and what closes it."""

    name: str
    give: Callable[[Driver], bytes]  # in the process that makes it
    take: Callable[[Driver, bytes], Answer]
    close: str = ""


def _memory(maker: Driver) -> bytes:
    [pointer] = maker.do("cuMemAlloc_v2", Out(), 4 * MIB)
    return maker.call("cuIpcGetMemHandle", Out(64), pointer).outputs[0]


def _by_handle(symbol: str) -> Callable[[Driver, bytes], Answer]:
    return lambda driver, given: driver.call_by_value(symbol, given, LAZY_PEER_ACCESS)


def _file(maker: Driver, symbol: str, handle: int) -> bytes:
    """A file that the maker exports, as other processes open it."""
    [number] = maker.do(symbol, Out(4), handle, FILE, 0)
    return f"/proc/{maker.pid}/fd/{number}".encode()


def _physical(maker: Driver) -> bytes:
    [handle, _] = maker.do("cuMemCreate", Out(), 4 * MIB, on_device(0), 0)
    return _file(maker, "cuMemExportToShareableHandle", handle)


def _pool(maker: Driver) -> bytes:
    [pool, _] = maker.do("cuMemPoolCreate", Out(), pool_on(0))
    maker.do("cuMemAllocFromPoolAsync", Out(), 4 * MIB, pool, 0)
    return _file(maker, "cuMemPoolExportToShareableHandle", pool)


def _of_file(symbol: str, *further: int) -> Callable[[Driver, bytes], Answer]:
    def take(driver: Driver, given: bytes) -> Answer:
        number = driver.opened(given.decode())
        return driver.call(symbol, Out(), number, FILE, *further)

    return take


def _external(driver: Driver, _: bytes) -> Answer:
    described = packed("i4xi12xQI64x4x", FILE, 3, 4 * MIB, 0)
    return driver.call("cuImportExternalMemory", Out(), described)


def _multicast(driver: Driver, _: bytes) -> Answer:
    return driver.call("cuMulticastCreate", Out(), packed("I4xQQQ", 1, 4 * MIB, FILE, 0))


IMPORTS = [
    Import("IPC", _memory, _by_handle("cuIpcOpenMemHandle"), "cuIpcCloseMemHandle"),
    Import("IPC 2", _memory, _by_handle("cuIpcOpenMemHandle_v2"), "cuIpcCloseMemHandle"),
    Import("physical", _physical, _of_file("cuMemImportFromShareableHandle"), "cuMemRelease"),
    Import("pool", _pool, _of_file("cuMemPoolImportFromShareableHandle", 0), "cuMemPoolDestroy"),
    Import("external", _memory, _external, "cuDestroyExternalMemory"),
    Import("multicast", _memory, _multicast, "cuMemRelease"),
]
imports = pytest.mark.parametrize("way", IMPORTS, ids=lambda way: way.name)


@imports
def test_imported_memory_is_counted_where_it_was_made(place: Make, way: Import) -> None:
    """The maker is of another container: nothing of it is this group's."""
    here = place(memory=4 * MIB)
    with here.stranger() as maker:
        maker.start()
        given = way.give(maker)
        driver = here.started()
        answer = way.take(driver, given)
        assert answer.result == 0
        assert here.group.used == 0
        assert here.resident() == 4 * MIB
        driver.do("cuMemAlloc_v2", Out(), 4 * MIB)  # all of the limit is left
        driver.do(way.close, answer.ints[0])
        assert here.group.used == 4 * MIB
        assert here.resident() == 8 * MIB


def test_what_a_process_imports_of_itself_is_its_own_once(place: Make) -> None:
    here = place()
    driver = here.started()
    handle = driver.do("cuMemCreate", Out(), 4 * MIB, on_device(0), 0)[0]
    [file] = driver.do("cuMemExportToShareableHandle", Out(4), handle, FILE, 0)
    assert driver.do("cuMemImportFromShareableHandle", Out(), file, FILE) == [handle]
    driver.do("cuMemRelease", handle)
    assert here.group.used == here.resident() == 4 * MIB
    driver.do("cuMemRelease", handle)
    assert here.group.used == here.resident() == 0
