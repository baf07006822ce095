"""NVML shows the group's limit and use, through the vendor's own client."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from tests.gpu.conftest import MIB, Place
from tests.standin.driver import Out

Make = Callable[..., Place]
NOT_READY = 27

ASK = """
import json, pynvml as n
n.nvmlInit()
gpu = n.nvmlDeviceGetHandleByIndex(0)
def code(call, *arguments):
    try:
        return call(*arguments)
    except n.NVMLError as error:
        return error.value
print(json.dumps({}))
"""


def ask(here: Place, expression: str) -> Any:  # noqa: ANN401 - JSON
    """The value of an expression over NVML, in a process of the container."""
    done = subprocess.run(
        [sys.executable, "-c", ASK.format(expression)],
        env=here.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


MEMORY = "[[m.total, m.free, m.used] for m in (n.nvmlDeviceGetMemoryInfo(gpu),"
MEMORY += " n.nvmlDeviceGetMemoryInfo(gpu, version=n.nvmlMemory_v2))]"


def test_memory_is_what_cuda_shows(place: Make) -> None:
    here = place(memory=64 * MIB)
    driver = here.started()
    driver.do("cuMemAlloc_v2", Out(), 24 * MIB)
    assert ask(here, MEMORY) == [[64 * MIB, 40 * MIB, 24 * MIB]] * 2
    here.group.set_memory(16 * MIB)
    assert ask(here, MEMORY) == [[16 * MIB, 0, 24 * MIB]] * 2
    assert driver.do("cuMemGetInfo_v2", Out(), Out()) == [0, 16 * MIB]


def test_a_limit_above_what_the_gpu_has_shows_what_it_has(place: Make) -> None:
    here = place(memory=2**60, bytes=1024 * MIB)
    assert [total for total, _, _ in ask(here, MEMORY)] == [1024 * MIB, 1024 * MIB]


def test_without_the_files_nothing_is_shown(place: Make) -> None:
    here = place(memory=64 * MIB)
    here.group.limits.unlink()
    assert ask(here, "code(n.nvmlDeviceGetMemoryInfo, gpu)") == NOT_READY
    assert ask(here, "n.nvmlDeviceGetCount()") == 1
