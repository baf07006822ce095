"""Python objects are in glibc's heaps, and freed memory returns to the kernel."""

import os
import subprocess
import sys

from tests.plugins import CHECKOUT
from tests.waiting import PATIENCE

FREED = """
import gc, os, sys
from agent.serve.launcher_server import trim
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
before = resident()
values = [str(number) for number in range(1_000_000)]
lasting = values[::1000]
del values
trim()
print(resident() - before)
"""


def test_memory_goes_back_though_something_lasts_everywhere_in_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FREED],
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONMALLOC": "malloc", "MALLOC_ARENA_MAX": "2"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert int(done.stdout) < 20  # of some 100 MiB; Python's own arenas would keep all of it
