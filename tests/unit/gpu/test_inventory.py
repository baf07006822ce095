"""Which GPUs are listed while the driver comes and goes."""

from pathlib import Path

import pytest

from base.paths import Paths
from gpu.inventory import GpuInventory, GpuMemory
from tests.unit.gpu.driver import Driver


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(Paths(proc=tmp_path / "proc", dev=tmp_path / "dev", sys=tmp_path / "sys"))


def test_nothing_is_listed_before_the_nodes_are_there(driver: Driver) -> None:
    inventory = GpuInventory(driver.paths)
    assert inventory.look() == []
    driver.gpu(0)
    assert inventory.look() == []
    driver.nodes(range(1))
    (listed,) = inventory.look()
    assert (listed.name, listed.fault, listed.gpu.address) == ("nvidia0", None, "0000:10:00.0")


def test_gpu_that_loses_its_node_stays_listed_with_the_fault(driver: Driver) -> None:
    inventory = GpuInventory(driver.paths)
    driver.load(2)
    assert len(inventory.look()) == 2
    (driver.paths.dev / "nvidia1").unlink()
    first, second = inventory.look()
    assert first.fault is None
    assert second.fault is not None
    assert "nvidia1" in second.fault


def test_gpu_that_is_gone_stays_listed_while_a_container_holds_it(driver: Driver) -> None:
    inventory = GpuInventory(driver.paths)
    driver.load(1)
    (listed,) = inventory.look()
    driver.unload()
    (gone,) = inventory.look([listed.gpu])
    assert gone.fault == "0000:10:00.0 is not on this node now"
    assert inventory.look() == []


def test_gpu_of_a_holder_is_listed_before_it_is_ready(driver: Driver) -> None:
    driver.load(1)
    (listed,) = GpuInventory(driver.paths).look()
    driver.unload()
    inventory = GpuInventory(driver.paths)
    assert [gpu.fault is None for gpu in inventory.look([listed.gpu])] == [False]
    assert not inventory.was_ready(listed.gpu)
    driver.load(1)
    assert [gpu.fault for gpu in inventory.look([listed.gpu])] == [None]
    assert inventory.was_ready(listed.gpu)


def test_sick_gpu_is_listed_with_its_fault_from_the_first_look_on(driver: Driver) -> None:
    driver.load(2)
    sick: dict[str, str] = {}
    inventory = GpuInventory(driver.paths, sick=lambda: sick)
    uuids = [gpu.gpu.uuid for gpu in GpuInventory(driver.paths).look()]
    for faults in ({uuids[1]: "critical error Xid 79"}, {}):
        sick.clear()
        sick.update(faults)
        gpus = inventory.look()
        assert [gpu.fault for gpu in gpus] == [None, sick.get(uuids[1])]
        assert all(inventory.was_ready(gpu.gpu) for gpu in gpus)


def test_usable_memory_is_never_below_zero() -> None:
    assert GpuMemory(total=10, reserved=3).usable == 7
    assert GpuMemory(total=1, reserved=3).usable == 0
