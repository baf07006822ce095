"""The ways to allocate memory of a GPU, as tables for tests."""

from collections.abc import Callable

import msgspec

from tests.gpu.forms import FLOAT, IN_DOMAIN, ON_DEVICE, array, on_device, pool_on
from tests.standin.driver import Answer, Driver, Out, packed

MIB = 1 << 20
ROW = 128 * 128 * 4  # bytes of a layer of the arrays here

Take = Callable[[Driver, int], Answer]
Free = Callable[[Driver, int], None]


class Way(msgspec.Struct, frozen=True):
    """A way to allocate: the call that allocates a number of bytes, and the call that frees them.

    The first outputs of the call are the handle and, for rows, the pitch.
    """

    name: str
    take: Take
    free: Free
    granule: int = 512
    outputs: int = 1


def _simple(symbol: str, *further: int) -> Take:
    return lambda driver, bytes_: driver.call(symbol, Out(), bytes_, *further)


def _rows(driver: Driver, bytes_: int) -> Answer:
    return driver.call("cuMemAllocPitch_v2", Out(), Out(), 500, bytes_ // 512, 4)


def _physical(kind: int, gpu: int) -> Take:
    described = on_device(gpu, kind)
    return lambda driver, bytes_: driver.call("cuMemCreate", Out(), bytes_, described, 0)


def _flat(driver: Driver, bytes_: int) -> Answer:
    described = packed("2QiI", 1024, bytes_ // 4096, FLOAT, 1)
    return driver.call("cuArrayCreate_v2", Out(), described)


def _deep(symbol: str, *levels: int) -> Take:
    def take(driver: Driver, bytes_: int) -> Answer:
        return driver.call(symbol, Out(), array(128, 128, bytes_ // ROW), *levels)

    return take


def _default_pool(driver: Driver) -> int:
    return driver.do("cuDeviceGetDefaultMemPool", Out(), 0)[0]


def _own_pool(kind: int = ON_DEVICE, gpu: int = 0) -> Callable[[Driver], int]:
    return lambda driver: driver.do("cuMemPoolCreate", Out(), pool_on(gpu, kind))[0]


def _from_pool(symbol: str, pool: Callable[[Driver], int]) -> Take:
    return lambda driver, bytes_: driver.call(symbol, Out(), bytes_, pool(driver), 0)


def graph_of(driver: Driver, bytes_: int) -> tuple[bytes, int]:
    """A graph that allocates on GPU 0: the memory's address, and the executable graph."""
    [graph] = driver.do("cuGraphCreate", Out(), 0)
    node = pool_on(0) + packed("4Q", 0, 0, bytes_, 0)
    added = driver.call("cuGraphAddMemAllocNode", Out(), graph, None, 0, node)
    [executable] = driver.do("cuGraphInstantiateWithFlags", Out(), graph, 0)
    return added.outputs[1][-8:], executable


def _graph(driver: Driver, bytes_: int) -> Answer:
    """The launch of a graph, whose memory stays until it is freed."""
    address, executable = graph_of(driver, bytes_)
    return Answer(driver.result("cuGraphLaunch", executable, 0), (address,))


def _free_of_graph(driver: Driver, pointer: int) -> None:
    driver.do("cuMemFreeAsync", pointer, 0)
    driver.do("cuDeviceGraphMemTrim", 0)


def _freed_by(symbol: str, *further: int) -> Free:
    def free(driver: Driver, handle: int) -> None:
        driver.do(symbol, handle, *further)
        driver.do("cuCtxSynchronize")

    return free


FREE, DESTROY = _freed_by("cuMemFree_v2"), _freed_by("cuArrayDestroy")
FREE_ASYNC = _freed_by("cuMemFreeAsync", 0)
POOLED, POOLED_OF_THREAD = "cuMemAllocFromPoolAsync", "cuMemAllocFromPoolAsync_ptsz"
PAGE = 2 * MIB
DOMAIN = 0x0100  # a locality domain of device 0

WAYS = [
    Way("linear", _simple("cuMemAlloc_v2"), FREE),
    Way("rows", _rows, FREE, outputs=2),
    Way("managed", _simple("cuMemAllocManaged", 1), FREE, 4096),
    Way("async", _simple("cuMemAllocAsync", 0), FREE_ASYNC, PAGE),
    Way(
        "async, thread's",
        _simple("cuMemAllocAsync_ptsz", 0),
        _freed_by("cuMemFreeAsync_ptsz", 0),
        PAGE,
    ),
    Way("async, freed at once", _simple("cuMemAllocAsync", 0), FREE, PAGE),
    Way("pool", _from_pool(POOLED, _default_pool), FREE_ASYNC, PAGE),
    Way("own pool", _from_pool(POOLED, _own_pool()), FREE_ASYNC, PAGE),
    Way(
        "own pool, thread's",
        _from_pool(POOLED_OF_THREAD, _own_pool()),
        _freed_by("cuMemFreeAsync_ptsz", 0),
        PAGE,
    ),
    Way(
        "pool in a domain",
        _from_pool(POOLED, _own_pool(IN_DOMAIN, DOMAIN)),
        FREE_ASYNC,
        PAGE,
    ),
    Way("physical", _physical(ON_DEVICE, 0), _freed_by("cuMemRelease"), PAGE),
    Way(
        "physical in a domain",
        _physical(IN_DOMAIN, DOMAIN),
        _freed_by("cuMemRelease"),
        PAGE,
    ),
    Way("array", _deep("cuArray3DCreate_v2"), DESTROY, ROW),
    Way("flat array", _flat, DESTROY, 65536),
    Way("mipmap", _deep("cuMipmappedArrayCreate", 1), _freed_by("cuMipmappedArrayDestroy"), ROW),
    Way("graph", _graph, _free_of_graph, PAGE, outputs=0),
]
