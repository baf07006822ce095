"""Memory that a process allocates, of every kind, counts against the group's limit."""

from collections.abc import Callable

import pytest

from tests.gpu.conftest import MIB, Place
from tests.standin.driver import UNTOUCHED, Driver, Out, packed

OUT_OF_MEMORY = 2
Make = Callable[..., Place]


def test_memory_is_counted_until_it_is_freed(place: Make) -> None:
    here = place(memory=64 * MIB)
    with here.started() as driver:
        [pointer] = driver.do("cuMemAlloc_v2", Out(), 10 * MIB)
        assert here.group.used == here.resident() == 10 * MIB
        driver.do("cuMemFree_v2", pointer)
        assert here.group.used == here.resident() == 0
        assert here.group.uses()[0].peak_bytes == 10 * MIB
