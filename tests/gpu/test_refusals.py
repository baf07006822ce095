"""If something is missing or wrong, the process prints one line and does not start."""

import random
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from gpu.limits import layout
from tests.gpu import group as groups
from tests.gpu.conftest import MIB, Place
from tests.standin.driver import Out
from tests.waiting import until

Make = Callable[..., Place]
OUT_OF_MEMORY, SYSTEM_NOT_READY = 2, 802


START = "import ctypes, sys; sys.exit(ctypes.CDLL('libcuda.so.1').cuInit(0) != 802)"


def refusal(here: Place) -> str:
    """The text that a process prints if it cannot start."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            START,
        ],
        env=here.environment,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    [text] = done.stderr.splitlines()
    assert text.startswith("podfabric: ")
    return text


def test_without_the_files_nothing_starts(place: Make) -> None:
    here = place()
    here.group.region.unlink()
    assert "region: No such file" in refusal(here)
    here.group.limits.unlink()
    assert "limits: No such file" in refusal(here)


@pytest.mark.parametrize("name", ["limits", "region"])
def test_files_of_another_version_or_size_are_refused(place: Make, name: str) -> None:
    here = place()
    path = here.group.directory / name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert "bytes instead of" in refusal(here)
    path.write_bytes(content[:8] + struct.pack("<I", 2) + content[12:])
    assert "not of version 1" in refusal(here)
    path.write_bytes(b"\0" * 8 + content[8:])
    assert "not of version 1" in refusal(here)
    path.write_bytes(content)
    here.started()


def test_files_of_two_groups_are_refused(place: Make) -> None:
    here = place()
    content = here.group.region.read_bytes()
    here.group.region.write_bytes(content[:16] + b"x" * 16 + content[32:])
    assert "does not belong" in refusal(here)


def test_without_the_agent_nothing_starts_and_its_slot_is_free(place: Make) -> None:
    here = place(agent=False)
    assert "agent" in refusal(here)
    here.group.start_agent()
    here.group.stop_agent()
    assert "Connection refused" in refusal(here)
    assert here.group.slots() == {}
    here.group.start_agent()
    here.started()


@pytest.mark.parametrize(
    ("status", "words"),
    [(1, "another version"), (2, "not find this process"), (3, "same slot"), (4, "try again")],
)
def test_what_the_agent_answers_is_told(place: Make, status: int, words: str) -> None:
    here = place()
    here.group.answer = struct.pack("<IIQ", status, 0, 0)
    assert words in refusal(here)
    here.group.answer = b"short"
    assert "Protocol error" in refusal(here)


def test_an_agent_that_does_not_answer_is_not_waited_for_without_end(place: Make) -> None:
    here = place(agent=False)
    here.libraries = groups.libraries(steps=True)
    path = here.group.directory / "agent/agent.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(path))
        silent.listen()
        assert "timed out" in refusal(here)


INIT = """
import ctypes
print("asks", flush=True)
print(ctypes.CDLL("libcuda.so.1").cuInit(0))
"""


def asking(here: Place) -> "subprocess.Popen[str]":
    """A process that calls cuInit, and has asked the agent."""
    process = subprocess.Popen(
        [sys.executable, "-c", INIT], stdout=subprocess.PIPE, env=here.environment, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "asks\n"
    until(lambda: len(here.group.slots()) == 1, what="slot of the process")
    return process


def test_an_agent_that_runs_and_is_slow_is_waited_for(place: Make) -> None:
    """Other work of a node may keep its agent waiting for longer than half a second."""
    here = place()
    here.group.answers.clear()
    with asking(here) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.7)
        here.group.answers.set()
        assert process.communicate()[0] == "0\n"


def test_an_agent_that_ends_before_it_answers_is_waited_for_no_longer(place: Make) -> None:
    here = place(agent=False)
    path = here.group.directory / "agent/agent.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as agent:
        agent.bind(str(path))
        agent.listen()
        process = asking(here)
    with process:
        assert process.communicate()[0] == f"{SYSTEM_NOT_READY}\n"
    assert here.group.slots() == {}


def test_limits_that_the_agent_writes_for_long_are_waited_for_while_it_runs(place: Make) -> None:
    here = place(agent=False)
    content = here.group.limits.read_bytes()
    with here.group.limits.open("r+b", buffering=0) as file:
        file.seek(16)
        file.write(struct.pack("<Q", 1001))
        assert "ended while it wrote" in refusal(here)
        here.group.start_agent()
        process = subprocess.Popen(
            [sys.executable, "-c", INIT], stdout=subprocess.PIPE, env=here.environment, text=True
        )
        with process:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.7)
            file.seek(16)
            file.write(content[16:24])
            assert process.communicate()[0] == "asks\n0\n"
    here.group.stop_agent()


def test_an_agent_that_died_while_it_wrote_stops_nobody_who_runs(place: Make) -> None:
    here = place(memory=8 * MIB)
    driver = here.started()
    with here.group.limits.open("r+b") as file:
        file.seek(16)
        file.write(struct.pack("<Q", 1001))
    driver.do("cuMemAlloc_v2", Out(), 8 * MIB)
    assert driver.result("cuMemAlloc_v2", Out(), 512) == OUT_OF_MEMORY
    here.group.stop_agent()
    assert "ended while it wrote" in refusal(here)


PARTS = {
    "whole": (0, layout.REGION_SIZE),
    "header": (0, 64),
    "mutex": (64, 128),
    "counts": (128, layout.USE_AT),
    "gpus": (layout.USE_AT, layout.SLOT_AT),
    "slots": (layout.SLOT_AT, layout.REGION_SIZE),
}
# A mutex that a thread has which does not live, and bytes that are no mutex at all.
TAKEN = (b"\xfe\xff\x0f\0".ljust(layout.MUTEX_KIND_AT, b"\0") + b"\x90").ljust(64, b"\0")
PATTERNS = {
    "zeros": bytes(layout.REGION_SIZE),
    "ones": b"\xff" * layout.REGION_SIZE,
    **{f"random {n}": random.Random(n).randbytes(layout.REGION_SIZE) for n in range(3)},
    "taken": TAKEN.ljust(layout.REGION_SIZE, b"\0"),
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("part", PARTS)
def test_what_a_tenant_writes_into_the_region_is_its_own_harm(
    place: Make, part: str, pattern: str
) -> None:
    """Its processes may fail or be counted wrongly, but end by no signal of ours, nor hang."""
    here = place(memory=8 * MIB)
    here.libraries = groups.libraries(steps=True)  # which waits 1 s instead of 30
    driver = here.started()
    driver.do("cuMemAlloc_v2", Out(), MIB)
    begin, end = PARTS[part]
    with here.group.region.open("r+b") as file:
        file.seek(begin)
        file.write(PATTERNS[pattern][: end - begin])
    assert driver.outcome("cuMemAlloc_v2", Out(), MIB) in (0, OUT_OF_MEMORY, SYSTEM_NOT_READY)
    assert driver.outcome("cuMemGetInfo_v2", Out(), Out()) in (0, SYSTEM_NOT_READY)
    assert here.process().outcome("cuInit", 0) in (0, SYSTEM_NOT_READY)
    code, said = driver.ended()
    assert code == 0
    assert ("region was overwritten" in said) == (part == "mutex" or part == "whole")


def test_who_waited_in_vain_for_the_lock_has_it_as_soon_as_it_is_open_again(place: Make) -> None:
    """As after a process that was stopped while it had the lock."""
    here = place(memory=8 * MIB)
    here.libraries = groups.libraries(steps=True)
    driver = here.started()
    [pointer] = driver.do("cuMemAlloc_v2", Out(), 6 * MIB)
    with here.group.region.open("r+b", buffering=0) as file:

        def write(mutex: bytes) -> None:
            file.seek(PARTS["mutex"][0])
            file.write(mutex)

        file.seek(PARTS["mutex"][0])
        opened = file.read(64)
        write(TAKEN)
        assert driver.outcome("cuMemAlloc_v2", Out(), MIB) == OUT_OF_MEMORY
        driver.do("cuMemFree_v2", pointer)  # which is counted when the lock is had again
        assert (here.group.used, here.resident()) == (6 * MIB, 0)
        write(opened)
        driver.do("cuMemAlloc_v2", Out(), 6 * MIB)
        assert here.group.used == here.resident() == 6 * MIB
        write(TAKEN)
        later = threading.Timer(0.3, write, [opened])
        later.start()
        driver.do("cuMemAlloc_v2", Out(), MIB)  # it waits as long as ever
        later.join()
    assert here.group.used == here.resident() == 7 * MIB


def test_a_slot_that_was_taken_away_is_replaced_by_another(place: Make) -> None:
    here = place(memory=8 * MIB)
    driver = here.started()
    driver.do("cuMemAlloc_v2", Out(), 3 * MIB)
    here.group.bury(driver.pid)
    driver.do("cuMemAlloc_v2", Out(), MIB)
    assert here.group.used == here.resident() == 4 * MIB
    assert len(here.group.registered) == 2
