"""The stand-in for libcuda: many threads and processes, their forks, and their deaths."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.standin import build
from tests.standin.gpus import GIB, MIB, Node, gpus

MakeNode = Callable[..., Node]
Start = Callable[[Node, int, int], subprocess.Popen[str]]


@pytest.fixture
def stress() -> Iterator[Start]:
    """Starts a program that allocates and frees at random: node, threads, seed."""
    with ExitStack() as stack:

        def start(node: Node, threads: int, seed: int) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [str(build.libraries() / "stress"), str(threads), str(seed)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=node.environment,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "working\n"
            return process

        yield start


def _held_at_the_end(process: subprocess.Popen[str]) -> int:
    """What a program that was told to stop holds, by its own count."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    return int(process.stdout.readline())


@pytest.mark.parametrize("reuse", [False, True])
def test_the_accounts_agree_with_what_many_threads_and_processes_hold(
    make_node: MakeNode, stress: Start, reuse: bool
) -> None:
    node = make_node(gpus(1, bytes=4 * GIB), reuse_addresses=reuse)
    processes = [stress(node, 8, seed) for seed in range(8)]
    for _ in range(50):
        assert node.read().gpus[0].resident <= 4 * GIB
    held = {process.pid: _held_at_the_end(process) for process in processes}
    accounts = node.read()
    for pid, own_count in held.items():
        assert accounts.process(pid).gpus[0].of("linear") == own_count
    assert accounts.gpus[0].peak <= 4 * GIB
    assert accounts.gpus[0].resident == sum(accounts.process(pid).gpus[0].bytes for pid in held)


def test_processes_killed_at_any_moment_leave_nothing_and_stop_no_other(
    make_node: MakeNode, stress: Start
) -> None:
    node = make_node(gpus(1, bytes=2 * GIB))
    last = stress(node, 2, 0)
    for seed in range(1, 41):
        process = stress(node, 2, seed)
        process.kill()
        process.wait()
        accounts = node.read()
        assert not accounts.process(process.pid).alive
        assert accounts.gpus[0].resident == accounts.process(last.pid).gpus[0].bytes
    own_count = _held_at_the_end(last)
    assert node.read().process(last.pid).gpus[0].of("linear") == own_count


_FORK = """
import ctypes, json, os
cuda = ctypes.CDLL("libcuda.so.1")
context, pointer = ctypes.c_void_p(), ctypes.c_uint64()

def start():
    results = [cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)]
    results.append(cuda.cuCtxSetCurrent(context))
    return [*results, cuda.cuMemAlloc_v2(ctypes.byref(pointer), SIZE)]

BEFORE
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, json.dumps([os.getpid(), start()]).encode())
    os.read(0, 1)
    os._exit(0)
child = json.loads(os.read(read, 1000))
print(json.dumps([os.getpid(), *child]), flush=True)
os.read(0, 1)
os.wait()
"""


def _forked(node: Node, before: str) -> tuple[subprocess.Popen[bytes], tuple[int, int, list[int]]]:
    text = _FORK.replace("BEFORE", before).replace("SIZE", str(MIB))
    command = [sys.executable, "-S", "-E", "-c", text]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=node.environment)
    assert process.stdout is not None
    parent, child, results = json.loads(process.stdout.readline())
    return process, (parent, child, results)


def test_a_child_forked_before_init_uses_the_driver_as_its_own(node: Node) -> None:
    process, (parent, child, results) = _forked(node, "")
    assert results == [0, 0, 0, 0]
    accounts = node.read()
    assert accounts.process(parent).gpus[0].bytes == 0
    assert accounts.process(child).gpus[0].bytes == MIB
    process.communicate()
    assert node.read().gpus[0].resident == 0


def test_a_child_forked_after_init_is_refused_and_holds_nothing(node: Node) -> None:
    process, (parent, child, results) = _forked(node, "assert start() == [0, 0, 0, 0]")
    assert set(results) == {3}
    accounts = node.read()
    assert accounts.process(parent).gpus[0].bytes == MIB
    assert accounts.process(child).gpus[0].bytes == 0
    process.communicate()


def test_memory_of_a_parent_that_dies_before_its_child_is_free(node: Node) -> None:
    process, (_, child, _) = _forked(node, "assert start() == [0, 0, 0, 0]")
    process.kill()
    process.wait()
    accounts = node.read()
    assert accounts.gpus[0].resident == 0
    assert accounts.process(child).alive
    assert process.stdin is not None
    process.stdin.close()


def test_a_program_that_replaces_itself_holds_nothing(node: Node) -> None:
    text = (
        "import ctypes, os\n"
        "cuda, context = ctypes.CDLL('libcuda.so.1'), ctypes.c_void_p()\n"
        "cuda.cuInit(0)\n"
        "cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0)\n"
        f"assert cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), {MIB}) == 0\n"
        "os.execv('/bin/sh', ['sh', '-c', 'echo replaced; read line'])\n"
    )
    command = [sys.executable, "-S", "-E", "-c", text]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=node.environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"replaced\n"
        accounts = node.read()
        assert accounts.process(process.pid).gpus[0].peak == MIB
        assert accounts.gpus[0].resident == 0
        process.communicate()


def test_a_slot_of_a_dead_process_is_used_again_when_none_is_left(node: Node) -> None:
    text = (
        "import ctypes, os\n"
        "ctypes.CDLL('libcuda.so.1')\n"
        "for number in range(520):\n"
        "    if os.fork() == 0:\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
    )
    command = [sys.executable, "-S", "-E", "-c", text]
    subprocess.run(command, env=node.environment, check=True)
    assert len(node.read().processes) == 512


_TWO_COPIES = """
import ctypes, json, os
libc = ctypes.CDLL(None)
libc.dlmopen.restype = libc.dlsym.restype = ctypes.c_void_p
libc.dlsym.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
NEW_NAMESPACE, NOW = -1, 2

def start(name_to_function):
    call = lambda name, *arguments: name_to_function(name)(*arguments)
    results = [call("cuInit", 0), call("cuCtxCreate_v2", ctypes.byref(context), 0, 0)]
    return [*results, call("cuMemAlloc_v2", ctypes.byref(pointer), SIZE)]

def of_second(name):
    return ctypes.CFUNCTYPE(ctypes.c_int)(libc.dlsym(second, name.encode()))

first = ctypes.CDLL("libcuda.so.1")
second = libc.dlmopen(NEW_NAMESPACE, b"libcuda.so.1", NOW)
print(json.dumps([start(first.__getattr__), start(of_second)]), flush=True)
os.read(0, 1)
"""


def test_a_second_copy_of_the_library_in_a_process_has_a_slot_of_its_own(node: Node) -> None:
    command = [sys.executable, "-S", "-E", "-c", _TWO_COPIES.replace("SIZE", str(MIB))]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=node.environment) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == [[0, 0, 0], [0, 0, 0]]
        held = [one.gpus[0].bytes for one in node.read().processes if one.pid == process.pid]
        assert held == [MIB, MIB]
        process.communicate()
    assert node.read().gpus[0].resident == 0
