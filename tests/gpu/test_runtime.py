"""The CUDA runtime, as NVIDIA ships it, gets the shim's functions, for all else the driver's."""

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.gpu.conftest import Place
from tests.gpu.group import hooked
from tests.gpu.programs import program

Make = Callable[..., Place]

# Distribution, the file in it, and how often it asks for an address.
RUNTIMES = {
    "12.9": ("nvidia-cuda-runtime-cu12", "libcudart.so.12", 419),
    "13.5": ("nvidia-cuda-runtime", "libcudart.so.13", 481),
}
PER_THREAD = 2


class Question(msgspec.Struct, frozen=True):
    """A call of cuGetProcAddress, and the library and symbol of what was answered."""

    name: str
    version: int
    flags: int
    library: str
    symbol: str


def runtime(version: str) -> tuple[Path, int]:
    name, file, questions = RUNTIMES[version]
    found = [path for path in importlib.metadata.files(name) or () if path.name == file]
    return Path(str(found[0].locate())), questions


def questions_of(here: Place, version: str) -> list[Question]:
    """The functions that a program of the CUDA runtime requests from the driver."""
    path, _ = runtime(version)
    log = here.directory / "questions"
    spy = here.directory / "spy"
    spy.mkdir()
    built = program("spy", "-shared", "-fPIC", output="spy.so")
    (spy / "libcuda.so.1").symlink_to(built)
    environment = {
        **here.environment,
        "LD_LIBRARY_PATH": f"{spy}:{here.libraries.shim}",
        "SPIED": str(here.libraries.shim / "libcuda.so.1"),
        "SPIED_LOG": str(log),
    }
    code = (
        f"import ctypes; runtime = ctypes.CDLL({str(path)!r}); "
        "runtime.cudaGetDeviceCount(ctypes.byref(ctypes.c_int()))"
    )
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
    rows = (line.split("\t") for line in log.read_text().splitlines())
    return [Question(name, int(at), int(flags), *found) for name, at, flags, *found in rows]


@pytest.mark.parametrize("version", list(RUNTIMES))
def test_the_runtime_gets_each_hook_and_the_driver_for_all_else(place: Make, version: str) -> None:
    here = place()
    questions = questions_of(here, version)
    assert len(questions) == runtime(version)[1]
    shim = str(here.libraries.shim / "libcuda.so.1")
    names = hooked()
    bases = {name.removesuffix("_ptsz").partition("_v")[0] for name in names}
    answered = [question for question in questions if question.library]
    assert len(answered) > 50
    for question in answered:
        is_shim = os.path.realpath(question.library) == os.path.realpath(shim)
        assert is_shim is (question.symbol in names), question
        if question.name in bases:
            assert is_shim, f"{question} leads past the shim"
    # The same name, for the legacy stream and the thread's: two functions.
    launches = {(q.version, q.flags): q.symbol for q in answered if q.name == "cuLaunchKernel"}
    assert launches[4000, 0] == "cuLaunchKernel"
    assert launches[7000, PER_THREAD] == "cuLaunchKernel_ptsz"
    own = {q.version: q.symbol for q in answered if q.name == "cuGetProcAddress"}
    assert own[11030] == "cuGetProcAddress"
    assert own[12000] == "cuGetProcAddress_v2"


STATIC = (
    "int cudaGetDeviceCount(int *); int main(void) { int n; return cudaGetDeviceCount(&n) / 10; }"
)


def test_a_program_with_the_runtime_linked_into_it_is_no_way_round(
    place: Make, tmp_path: Path
) -> None:
    """It loads the driver by name, too. Without a GPU it ends with error 500 after cuInit."""
    here = place()
    source = tmp_path / "static.c"
    source.write_text(STATIC)
    library = runtime("12.9")[0].with_name("libcudart_static.a")
    command = ["gcc", str(source), str(library), "-ldl", "-lrt", "-lpthread", "-o", "static"]
    subprocess.run(command, check=True)
    assert subprocess.run(["./static"], env=here.environment, timeout=60).returncode == 50
    assert len(here.group.registered) == 1
