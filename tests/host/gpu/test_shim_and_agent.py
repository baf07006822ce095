"""The real shim in real containers' cgroups, with the agent's registrar and watch."""

import shutil
from collections.abc import Callable, Iterator
from ctypes import sizeof
from pathlib import Path

import pytest

from gpu import layout, nvml
from gpu.group_limits import Limit
from gpu.watch import Watch
from tests.host.gpu.driver_root import installed
from tests.host.gpu.pods import GroupsNode, MadeContainer
from tests.standin import build as standin
from tests.standin.driver import Driver, Out
from tests.standin.gpus import GIB, MIB, Behaviour, Node, gpus
from tests.waiting import until
from tools import build_shim

OUT_OF_MEMORY, SYSTEM_NOT_READY = 2, 802
DIRECTORY = "pf-gpu"  # below the directory in which processes start
CONTEXT, RESERVE = 300 * MIB, 400 * MIB
ONE = gpus(1, bytes=16 * GIB, context_bytes=CONTEXT)
GPU = ONE[0].uuid


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shim under the driver's name, and the driver under the other, as mounts have them."""
    directory = tmp_path_factory.mktemp("shim")
    built, *_ = build_shim.build("", directory / "built", [f'PF_DIRECTORY="{DIRECTORY}"'])
    shutil.copy(built, directory / "libcuda.so.1")
    shutil.copy(standin.libraries() / "libcuda.so.1", directory / "libpfcuda-real.so.1")
    return directory


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Node]:
    with installed(tmp_path / "driver", ONE, Behaviour()) as driver:
        yield driver


Start = Callable[[MadeContainer | None], Driver]


@pytest.fixture
def start(
    node: GroupsNode,
    driver: Node,
    shim: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Start:
    """Starts a process with the shim of group "a", in a container."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / DIRECTORY).symlink_to(node.groups.root / "a")

    def started(container: MadeContainer | None) -> Driver:
        environment = {**driver.environment, "LD_LIBRARY_PATH": str(shim)}
        process = node.stack.enter_context(Driver(environment))
        if container is not None:
            container.take(process.pid)
        return process

    return started


def free(process: Driver) -> int:
    left, total = process.do("cuMemGetInfo_v2", Out(8), Out(8))
    assert total == 4 * GIB
    return left


def test_a_process_is_registered_when_it_starts_cuda_and_its_memory_is_free_when_it_is_killed(
    node: GroupsNode, start: Start
) -> None:
    container = node.container("a", limit=Limit(GPU, 4 * GIB, 1.0))
    first, second = start(container), start(container)
    first.start()
    second.start()
    assert sorted(node.alive("a").values()) == sorted((first.pid, second.pid))
    first.do("cuMemAlloc_v2", Out(8), 3 * GIB)
    assert second.result("cuMemAlloc_v2", Out(8), GIB) == OUT_OF_MEMORY
    first.kill()
    until(lambda: list(node.alive("a").values()) == [second.pid], what="end of the first")
    assert free(second) == 4 * GIB - RESERVE
    second.do("cuMemAlloc_v2", Out(8), 3 * GIB)


def test_a_context_counts_as_measured_once_the_watch_has_looked(
    node: GroupsNode, driver: Node, start: Start
) -> None:
    process = start(node.container("a", limit=Limit(GPU, 4 * GIB, 1.0)))
    process.start()
    process.do("cuMemAlloc_v2", Out(8), GIB)
    assert free(process) == 3 * GIB - RESERVE
    opened = nvml.open_driver(driver.file.parent)
    tenants = node.registrar._tenants
    watch = Watch(node.groups, tenants, node.registrar.living, lambda: {GPU: 0})
    sample = watch.look(opened)
    assert free(process) == 3 * GIB - CONTEXT
    [seen] = watch.look(opened).tenants
    assert seen.use is not None
    assert (seen.use.used_bytes, seen.device_bytes) == (GIB + CONTEXT, GIB + CONTEXT)
    assert (seen.overhead_bytes, seen.overuse_bytes) == (CONTEXT, 0)
    assert sample.gpus[0].unaccounted == {}
    opened.close()


def test_a_running_process_sees_new_limits(node: GroupsNode, start: Start) -> None:
    process = start(node.container("a", limit=Limit(GPU, 2 * GIB, 1.0)))
    process.start()
    assert process.result("cuMemAlloc_v2", Out(8), 3 * GIB) == OUT_OF_MEMORY
    node.groups.make("a", Limit(GPU, 4 * GIB, 1.0))
    assert free(process) == 4 * GIB - RESERVE
    process.do("cuMemAlloc_v2", Out(8), 3 * GIB)


def test_a_process_of_no_container_of_the_group_gets_no_gpu(node: GroupsNode, start: Start) -> None:
    node.container("a", limit=Limit(GPU, 2 * GIB, 1.0))
    other = node.container("b", limit=Limit(GPU, 2 * GIB, 1.0))
    for container in (other, None):
        assert start(container).result("cuInit", 0) == SYSTEM_NOT_READY
    assert node.alive("a") == node.alive("b") == {}


def test_without_an_agent_a_process_gets_no_gpu_and_with_the_next_one_it_does(
    node: GroupsNode, start: Start
) -> None:
    container = node.container("a", limit=Limit(GPU, 4 * GIB, 1.0))
    running = start(container)
    running.start()
    node.registrar.close()
    refused = start(container)
    assert refused.result("cuInit", 0) == SYSTEM_NOT_READY
    running.do("cuMemAlloc_v2", Out(8), GIB)  # needs no agent
    node.restart()
    start(container).start()
    running.kill()
    until(lambda: len(node.alive("a")) == 1, what="end of one that an earlier agent registered")


def test_a_process_that_finds_a_region_of_another_version_gets_no_gpu(
    node: GroupsNode, start: Start
) -> None:
    process = start(node.container("a", limit=Limit(GPU, 2 * GIB, 1.0)))
    with (node.groups.root / "a/region").open("r+b") as region:
        region.seek(layout.PfRegionHeader.version.offset)
        region.write((layout.VERSION + 1).to_bytes(4, "little"))
    for _ in range(2):
        assert process.result("cuInit", 0) == SYSTEM_NOT_READY
    process.process.kill()
    (line,) = process.ended()[1].splitlines()
    assert line.startswith("podfabric: ") and "region is not of version 1" in line


def test_a_process_that_finds_no_slot_gets_no_gpu(node: GroupsNode, start: Start) -> None:
    """All slots are of one process that lives, and each shim takes one."""
    container = node.container("a", limit=Limit(GPU, 2 * GIB, 1.0))
    running, refused = start(container), start(container)
    running.start()
    taken = (node.groups.root / "a/region").read_bytes()[layout.SLOT_AT :][: sizeof(layout.PfSlot)]
    with (node.groups.root / "a/region").open("r+b") as region:
        region.seek(layout.SLOT_AT)
        region.write(taken * layout.SLOTS)
    assert refused.result("cuInit", 0) == SYSTEM_NOT_READY
