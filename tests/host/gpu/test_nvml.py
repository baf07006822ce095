"""NVML with types, of a driver below a separate root."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu.driver import nvml
from gpu.driver.nvml import Nvml, NvmlError
from tests.host.gpu.driver_root import installed
from tests.standin.driver import Driver, Out
from tests.standin.gpus import GIB, MIB, Behaviour, Failure, Node, gpus

TWO = gpus(2, bytes=8 * GIB, reserved_bytes=600 * MIB, context_bytes=300 * MIB)
FIRST, SECOND = (gpu.uuid for gpu in TWO)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with installed(tmp_path, TWO, Behaviour()) as node:
        yield node


@pytest.fixture
def opened(node: Node) -> Iterator[Nvml]:
    opened = nvml.open_driver(node.file.parent)
    yield opened
    opened.close()


def test_node_without_a_driver_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(NvmlError, match=f"no libnvidia-ml.so.1 below {tmp_path}: install"):
        nvml.open_driver(tmp_path)


def test_file_that_is_not_a_library_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64/libnvidia-ml.so.1").write_text("no library")
    with pytest.raises(NvmlError, match=r"cannot load .*lib64/libnvidia-ml\.so\.1"):
        nvml.open_driver(tmp_path)


def test_a_driver_whose_module_is_not_loaded_is_an_error(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PODFABRIC_STANDIN_GPUS")
    with pytest.raises(NvmlError, match="nvmlInitWithFlags") as caught:
        nvml.open_driver(node.file.parent)
    assert caught.value.code == 9


def test_gpus_and_their_memory(opened: Nvml) -> None:
    assert opened.uuids() == [FIRST, SECOND]
    assert opened.driver_version() == "615.20.01"
    memory = opened.memory(FIRST)
    assert (memory.total, memory.reserved) == (8 * GIB, 600 * MIB)
    with pytest.raises(NvmlError, match="nvmlDeviceGetHandleByUUID"):
        opened.memory("GPU-ffffffff-0000-0000-0000-000000000000")


def test_processes_and_what_they_use(node: Node, opened: Nvml) -> None:
    assert opened.processes(FIRST) == {}
    with Driver(node.environment) as driver:
        driver.start()
        driver.do("cuMemAlloc_v2", Out(8), GIB)
        assert opened.processes(FIRST) == {driver.pid: GIB + 300 * MIB}
        assert opened.processes(SECOND) == {}
    assert opened.processes(FIRST) == {}


def test_process_of_a_container_has_its_host_pid(node: Node, opened: Nvml) -> None:
    contained = ("unshare", "--pid", "--fork", "--kill-child")
    with Driver(node.environment, through=contained) as driver:
        driver.start()
        inside = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text()
        assert opened.processes(FIRST) == {int(inside): 300 * MIB}


def test_utilization_of_a_gpu_that_was_never_used_is_none(opened: Nvml) -> None:
    assert opened.utilization(FIRST, 0) == []


def test_samples_that_grow_at_each_question_are_no_answer(
    opened: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer without samples would mean that no process used the GPU."""

    def too_small(*_: object) -> None:
        raise NvmlError("insufficient size", 7)

    monkeypatch.setattr(opened, "_of", too_small)
    with pytest.raises(NvmlError, match="insufficient size"):
        opened.utilization(FIRST, 0)


def test_a_driver_of_another_file_can_be_opened_after_the_first(
    node: Node, opened: Nvml, tmp_path: Path
) -> None:
    other = gpus(1, uuid="GPU-0000000f-57a0-4d1e-8000-000000000000")
    with installed(tmp_path / "other", other, Behaviour(driver="580.65.06")) as newer:
        again = nvml.open_driver(newer.file.parent)
        assert again.driver_version() == "580.65.06"
        assert again.uuids() == [other[0].uuid]
        again.close()
    # `opened` used the previous library: the process has one at a time.
    reopened = nvml.open_driver(node.file.parent)
    assert reopened.uuids() == [FIRST, SECOND]


def test_a_failure_of_the_driver_is_an_error_that_names_the_call(tmp_path: Path) -> None:
    lost = Failure("nvmlDeviceGetMemoryInfo_v2", 2, 15)
    with installed(tmp_path, TWO, Behaviour(failures=(lost,))) as node:
        opened = nvml.open_driver(node.file.parent)
        opened.memory(FIRST)
        with pytest.raises(NvmlError, match="nvmlDeviceGetMemoryInfo: ") as caught:
            opened.memory(FIRST)
        assert caught.value.code == 15
        opened.memory(FIRST)
        opened.close()
