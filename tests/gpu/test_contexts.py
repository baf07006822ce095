"""The memory of contexts counts with the first context. Allocations end with their context."""

from collections.abc import Callable

import pytest

from tests.gpu.conftest import MIB, Place
from tests.gpu.forms import FLOAT
from tests.gpu.ways import graph_of
from tests.standin.driver import Argument, Driver, Out, packed

OUT_OF_MEMORY, INVALID_VALUE = 2, 1
DEFAULT_STREAM, RESOURCES = 1, 4096  # a green context's flag; its resources' descriptor, any
Make = Callable[..., Place]

# The calls that make a context on device 0, their arguments, and the calls that end it.
CREATIONS: tuple[tuple[str, tuple[Argument, ...], str], ...] = (
    ("cuCtxCreate", (0, 0), "cuCtxDestroy"),
    ("cuCtxCreate_v2", (0, 0), "cuCtxDestroy_v2"),
    ("cuCtxCreate_v3", (None, 0, 0, 0), "cuCtxDestroy"),
    ("cuCtxCreate_v4", (None, 0, 0), "cuCtxDestroy_v2"),
    ("cuGreenCtxCreate", (RESOURCES, 0, DEFAULT_STREAM), "cuGreenCtxDestroy"),
)
creations = pytest.mark.parametrize(
    ("create", "arguments", "destroy"), CREATIONS, ids=[row[0] for row in CREATIONS]
)
ENDS = (
    "cuDevicePrimaryCtxRelease",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxReset",
    "cuDevicePrimaryCtxReset_v2",
)


def initialised(here: Place) -> Driver:
    """A process without a context."""
    driver = here.process()
    driver.do("cuInit", 0)
    return driver


def test_init_makes_no_context(place: Make) -> None:
    here = place(context=MIB, context_bytes=MIB)
    driver = initialised(here)
    assert here.node.read().process(driver.pid).gpus[0].contexts == 0
    assert here.group.used == here.resident() == 0
    driver.do("cuDevicePrimaryCtxRetain", Out(), 0)  # which is what would have been seen
    assert here.node.read().process(driver.pid).gpus[0].contexts == 1
    assert here.group.used == here.resident() == MIB


@creations
def test_each_creation_counts_the_first_context_alone(
    place: Make, create: str, arguments: tuple[Argument, ...], destroy: str
) -> None:
    here = place(context=MIB)
    driver = initialised(here)
    first, second = (driver.do(create, Out(), *arguments)[0] for _ in range(2))
    assert here.group.used == MIB
    driver.do(destroy, first)
    assert here.group.used == MIB
    driver.do(destroy, second)
    assert here.group.used == 0


@creations
def test_a_context_that_does_not_fit_is_not_made(
    place: Make, create: str, arguments: tuple[Argument, ...], destroy: str
) -> None:
    here = place(memory=4 * MIB, context=4 * MIB + 1)
    driver = initialised(here)
    answer = driver.call(create, Out(), *arguments)
    assert (answer.result, set(answer.outputs[0])) == (OUT_OF_MEMORY, {0xEE})
    assert here.node.read().process(driver.pid).gpus[0].contexts == 0
    here.group.set_memory(4 * MIB + 1)
    driver.do(create, Out(), *arguments)


@creations
def test_a_context_that_the_driver_refuses_is_not_counted(
    place: Make, create: str, arguments: tuple[Argument, ...], destroy: str
) -> None:
    here = place(context=MIB)
    driver = initialised(here)
    assert driver.result(create, None, *arguments) == INVALID_VALUE
    assert here.group.used == 0


def test_a_green_context_keeps_the_primary_one(place: Make) -> None:
    here = place(context=MIB)
    driver = here.started()
    [green] = driver.do("cuGreenCtxCreate", Out(), RESOURCES, 0, DEFAULT_STREAM)
    driver.do("cuMemAlloc_v2", Out(), 4 * MIB)
    driver.do("cuDevicePrimaryCtxRelease_v2", 0)
    assert here.group.used == 5 * MIB
    driver.do("cuGreenCtxDestroy", green)
    assert here.group.used == here.resident() == 0


def test_what_is_allocated_in_a_green_context_ends_with_the_last_one(place: Make) -> None:
    """No call says of which device's primary context a context is that was made of a green one."""
    here = place(context=MIB)
    driver = initialised(here)
    [green] = driver.do("cuGreenCtxCreate", Out(), RESOURCES, 0, DEFAULT_STREAM)
    [context] = driver.do("cuCtxFromGreenCtx", Out(), green)
    driver.do("cuCtxSetCurrent", context)
    driver.do("cuMemAlloc_v2", Out(), 4 * MIB)
    assert (here.group.used, here.resident()) == (5 * MIB, 4 * MIB)
    driver.do("cuGreenCtxDestroy", green)
    assert here.group.used == here.resident() == 0


def test_a_reset_releases_nothing(place: Make) -> None:
    """So a release after it ends the context only if it was not retained before."""
    here = place(memory=8 * MIB)
    driver = here.started()
    driver.do("cuDevicePrimaryCtxReset_v2", 0)
    [context] = driver.do("cuDevicePrimaryCtxRetain", Out(), 0)
    driver.do("cuCtxSetCurrent", context)
    driver.do("cuMemAlloc_v2", Out(), 8 * MIB)
    driver.do("cuDevicePrimaryCtxRelease_v2", 0)
    assert here.group.used == here.resident() == 8 * MIB
    assert driver.result("cuMemAlloc_v2", Out(), MIB) == OUT_OF_MEMORY
    driver.do("cuDevicePrimaryCtxRelease_v2", 0)
    assert here.group.used == here.resident() == 0


@pytest.mark.parametrize("destroy", ["cuCtxDestroy", "cuCtxDestroy_v2"])
def test_a_context_takes_its_allocations_with_it(place: Make, destroy: str) -> None:
    here = place(context=MIB)
    driver = here.started()
    driver.do("cuMemAlloc_v2", Out(), 4 * MIB)
    [context] = driver.do("cuCtxCreate_v2", Out(), 0, 0)
    driver.do("cuMemAlloc_v2", Out(), 8 * MIB)
    driver.do("cuArrayCreate_v2", Out(), packed("2QiI", 128, 128, FLOAT, 1))
    driver.do(destroy, context)
    assert here.group.used == 5 * MIB
    assert here.resident() == 4 * MIB


@pytest.mark.parametrize("end", ENDS)
def test_a_primary_context_takes_all_of_the_process_with_it(place: Make, end: str) -> None:
    """At its last release, or at once if it is reset."""
    here = place(context=MIB, memory=128 * MIB)
    driver = here.started()
    driver.do("cuDevicePrimaryCtxRetain", Out(), 0)
    driver.do("cuMemAlloc_v2", Out(), 4 * MIB)
    driver.do("cuArrayCreate_v2", Out(), packed("2QiI", 128, 128, FLOAT, 1))
    driver.do("cuMemAllocAsync", Out(), 2 * MIB, 0)
    _, executable = graph_of(driver, 2 * MIB)
    driver.do("cuGraphLaunch", executable, 0)
    held = here.resident()
    assert here.group.used == held + MIB
    if "Release" in end:
        driver.do(end, 0)
        assert here.group.used == held + MIB
    driver.do(end, 0)
    assert here.group.used == here.resident() == 0
