"""The device nodes of NVIDIA's driver, from a made-up /dev."""

from pathlib import Path

import pytest

from base.paths import Paths
from gpu.driver import gpu_device_files
from host.errors import HostError
from tests.unit.gpu.driver import UVM, Driver

pytestmark = pytest.mark.root


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    driver = Driver(Paths(proc=tmp_path / "proc", dev=tmp_path / "dev"))
    driver.load(2)
    return driver


def test_each_node_is_given_once(driver: Driver) -> None:
    given = gpu_device_files.of_gpus(driver.paths, [1, 0, 1])
    assert [node.path for node in given] == [
        *("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm"),
        "/dev/nvidia-uvm-tools",
    ]
    assert (given[1].major, given[1].minor) == (195, 1)
    assert (given[3].major, given[3].minor) == (UVM, 0)
    assert given[0].host == str(driver.paths.dev / "nvidia0")


def test_nodes_for_tools_may_be_missing(driver: Driver) -> None:
    (driver.paths.dev / "nvidia-uvm-tools").unlink()
    assert len(gpu_device_files.of_gpus(driver.paths, [0])) == 3


@pytest.mark.parametrize("name", ["nvidia0", "nvidiactl", "nvidia-uvm"])
def test_missing_node_is_named(driver: Driver, name: str) -> None:
    (driver.paths.dev / name).unlink()
    with pytest.raises(HostError, match=rf"/{name}: No such file or directory: "):
        gpu_device_files.of_gpus(driver.paths, [0])
    assert gpu_device_files.fault(driver.paths, 0) is not None


def test_only_character_devices_are_given(driver: Driver) -> None:
    path = driver.paths.dev / "nvidia-uvm-tools"
    path.unlink()
    path.write_text("")
    with pytest.raises(HostError, match="is not a character device"):
        gpu_device_files.of_gpus(driver.paths, [0])
    assert (
        gpu_device_files.fault(driver.paths, 0) is None
    )  # no GPU is lost to a node that it can do without
