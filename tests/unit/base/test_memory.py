"""Python objects are in glibc's heaps, and freed memory returns to the kernel."""

import os
import subprocess
import sys

from tests.plugins import CHECKOUT
from tests.waiting import PATIENCE

BEGUN_AGAIN = """
import os, sys
from base import memory
sys.stderr.write("begun ")
memory.allocate_in_glibc()
print(os.getpid(), os.environ["PYTHONMALLOC"], *sys.argv[1:])
"""

FREED = """
import gc, os, sys
from base import memory
memory.allocate_in_glibc()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
before = resident()
values = [str(number) for number in range(1_000_000)]
lasting = values[::1000]
del values
memory.trim()
print(resident() - before)
"""


def python(script: str, **more: str) -> "subprocess.Popen[str]":
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONMALLOC"}
    return subprocess.Popen(
        [sys.executable, "-c", script, "a b", "c"],
        cwd=CHECKOUT,
        env=environ | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_process_begins_again_once_with_its_arguments() -> None:
    with python(BEGUN_AGAIN) as process:
        out, errors = process.communicate(timeout=PATIENCE)
    assert out == f"{process.pid} malloc a b c\n"
    assert errors == "begun begun "


def test_an_allocator_that_somebody_chose_stays() -> None:
    with python(BEGUN_AGAIN, PYTHONMALLOC="pymalloc") as process:
        out, errors = process.communicate(timeout=PATIENCE)
    assert out == f"{process.pid} pymalloc a b c\n"
    assert errors == "begun "


def test_memory_goes_back_though_something_lasts_everywhere_in_it() -> None:
    with python(FREED) as process:
        out, _ = process.communicate(timeout=PATIENCE)
    assert int(out) < 20  # of some 100 MiB; Python's own arenas would keep all of it
