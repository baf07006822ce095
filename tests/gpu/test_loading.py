"""Every way to the driver's library leads through the shim, and is counted once."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.gpu import group as groups
from tests.gpu.conftest import MIB, Place
from tests.gpu.drivers import driver_of, not_symbolic
from tests.gpu.group import hooked
from tests.gpu.programs import program
from tests.standin import build as standin
from tests.standin.driver import Driver, Out
from tests.standin.gpus import Behaviour, table
from tools import build_shim

Make = Callable[..., Place]

NOT_FOUND, VERSION_NOT_SUFFICIENT = 500, 2
RTLD_LAZY, RTLD_NOW, RTLD_DEEPBIND, RTLD_GLOBAL = 1, 2, 8, 0x100
# glibc's file of the real library, as a program names it
ROUTES = [
    ["default"],
    ["dlvsym", "libcuda.so.1"],
    ["dlopen", "libcuda.so.1", str(RTLD_NOW)],
    ["dlopen", "libcuda.so", str(RTLD_NOW)],
    ["dlopen", "ABSOLUTE", str(RTLD_NOW)],
    ["dlopen", "libcuda.so.1", str(RTLD_LAZY | RTLD_GLOBAL)],
    ["dlopen", "libcuda.so.1", str(RTLD_NOW | RTLD_DEEPBIND)],
    ["dlmopen", "libcuda.so.1"],
    ["address", "0"],
    ["address", "1"],
    ["address", "2"],
]


@contextmanager
def running(
    here: Place, executable: Path, arguments: Sequence[str], environment: dict[str, str]
) -> Iterator[None]:
    """A program that has allocated 1 MiB and launched a kernel, until the end of the block."""
    absolute = str(here.libraries.shim / "libcuda.so.1")
    command = [str(executable), *(one.replace("ABSOLUTE", absolute) for one in arguments)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        line = process.stdout.readline()
        if line != b"ready\n":
            raise AssertionError(f"{arguments} ended with {process.wait()}")
        yield
        process.stdin.close()
    assert process.returncode == 0


@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
def test_each_route_leads_to_the_shim(place: Make, route: list[str]) -> None:
    here = place()
    # A clean environment, except for the variables that replace the mounts.
    with running(here, program("route"), route, here.environment):
        assert here.group.used == here.resident() == MIB
        assert here.group.use().launches == 1


@pytest.mark.parametrize("route", ["linked", "next"])
def test_a_linked_program_is_led_to_the_shim(place: Make, route: str) -> None:
    here = place()
    library = here.libraries.shim / "libcuda.so.1"
    flags = ["-DLINKED", "-Wl,--no-as-needed", str(library), "-Wl,--allow-shlib-undefined"]
    with running(here, program("route", *flags, output="linked"), [route], here.environment):
        assert here.group.used == here.resident() == MIB
        assert here.group.use().launches == 1


def test_a_function_that_the_shim_does_not_know_is_the_drivers(place: Make) -> None:
    here = place(count=2)
    with here.process() as driver:
        driver.do("cuInit", 0)
        assert driver.do("cuDeviceGetCount", Out(4)) == [2]
        assert driver.do("cuDriverGetVersion", Out(4)) == [13050]


@pytest.mark.parametrize("symbolic", [True, False])
def test_a_driver_that_calls_its_own_exports_is_counted_once(place: Make, symbolic: bool) -> None:
    here = place(behaviour=Behaviour(reenter=True))
    if not symbolic:
        here.libraries = groups.libraries(real=str(not_symbolic()))
    with here.started() as driver:
        pointer, pitch = driver.do("cuMemAllocPitch_v2", Out(), Out(), 1000, 1024, 4)
        assert here.group.used == here.resident() == pitch * 1024
        driver.do("cuMemFree_v2", pointer)
        assert here.group.used == 0


# ---- cuGetProcAddress ----------------------------------------------------------------------------


def test_an_empty_name_is_handed_to_the_driver(place: Make) -> None:
    here = place()
    plain = {**here.environment, "LD_LIBRARY_PATH": str(here.libraries.plain)}
    with here.process() as driver, Driver(plain) as real:
        for version in (0, 12000):
            for symbol in ("", "cuNoSuchFunction"):
                assert driver.call(
                    "cuGetProcAddress_v2", symbol, Out(8), version, 0, Out(4)
                ) == real.call("cuGetProcAddress_v2", symbol, Out(8), version, 0, Out(4))


def test_each_version_of_a_function_leads_to_its_own_hook(place: Make) -> None:
    """In both forms and both stream variants: what dlsym(3) finds, the hook if there is one."""
    here = place()
    asked = [(base, version, symbol, 2 if own else 1) for base, version, symbol, own in table()]
    done = subprocess.run(
        [sys.executable, "-c", ADDRESSES],
        input=json.dumps(asked),
        stdout=subprocess.PIPE,
        env=here.environment,
        check=True,
        text=True,
    )
    assert json.loads(done.stdout) == []
    assert hooked() <= {symbol for _, _, symbol, _ in table()}


ADDRESSES = """
import ctypes, json, sys
library = ctypes.CDLL("libcuda.so.1")
def at(symbol):
    return ctypes.cast(library[symbol], ctypes.c_void_p).value
found = []
for base, version, symbol, flags in json.load(sys.stdin):
    pointer, first, status = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(-1)
    name = base.encode()
    ask = [ctypes.c_int(version), ctypes.c_uint64(flags)]
    result = library.cuGetProcAddress_v2(name, ctypes.byref(pointer), *ask, ctypes.byref(status))
    result |= library.cuGetProcAddress(name, ctypes.byref(first), *ask)
    same = pointer.value == first.value == at(symbol)
    if (result, status.value, same) != (0, 0, True):
        found.append([symbol, result, status.value])
print(json.dumps(found))
"""


def test_the_shim_hooks_at_most_90_functions_and_exports_nothing_else() -> None:
    names = hooked()
    assert 60 < len(names) <= 90
    assert names <= {symbol for _, _, symbol, _ in table()}


def test_the_shim_asks_for_nothing_that_an_old_c_library_lacks() -> None:
    """Containers bring their own, back to glibc 2.17."""
    for path in build_shim.build():
        text = subprocess.check_output(["readelf", "-V", str(path)], text=True)
        versions = [word for word in text.split() if word.startswith("GLIBC_")]
        assert versions
        assert max(tuple(map(int, word[6:].split("."))) for word in versions) <= (2, 17)


def test_the_shim_reads_no_environment_variable() -> None:
    for path in build_shim.build():
        text = subprocess.check_output(["nm", "-D", "--undefined-only", str(path)], text=True)
        assert "getenv" not in text
        assert "environ" not in text


def test_the_shim_is_linked_as_its_mount_needs_it() -> None:
    text = subprocess.check_output(["readelf", "-dW", str(build_shim.build()[0])], text=True)
    for part in (
        "soname: [libcuda.so.1]",
        "library: [libpfcuda-real.so.1]",
        "runpath: [/usr/lib/podfabric:$ORIGIN]",
        "(SYMBOLIC)",
        "NOW",
        "NODELETE",
    ):
        assert part.lower() in text.lower()


def test_the_shim_is_built_for_arm64(tmp_path: Path) -> None:
    for path in build_shim.build("aarch64-linux-gnu"):
        text = subprocess.check_output(["readelf", "-hVW", str(path)], text=True)
        assert "AArch64" in text
        versions = [word for word in text.split() if word.startswith("GLIBC_")]
        assert set(versions) == {"GLIBC_2.17"}


# ---- a driver that is newer than the shim --------------------------------------------------------

NEWER_ROW = "EXPORT(cuMemAlloc, 14000, cuMemAlloc_v9, 0)\n"
NEWER = '#include "objects.h"\nPUBLIC CUresult cuMemAlloc_v9(void) { return SUCCESS; }\n'


def _newer() -> Path:
    """The driver with a version of cuMemAlloc that no shim knows."""
    sources = groups.BUILT / "newer-sources"
    for part in ("node", "cuda"):
        shutil.copytree(standin.HERE / part, sources / part, dirs_exist_ok=True)
    table_of_exports = sources / "cuda/exports.def"
    table_of_exports.write_text(table_of_exports.read_text() + NEWER_ROW)
    (sources / "cuda/newer.c").write_text(NEWER)
    return driver_of(sources, "newer.so")


def test_a_version_that_the_shim_does_not_know_is_not_handed_out(place: Make) -> None:
    here = place(behaviour=Behaviour(cuda=14000))
    here.libraries = groups.libraries(real=str(_newer()))
    with here.process() as driver:
        result, address, status = driver.proc("cuMemAlloc", 14000)
        first = driver.call("cuGetProcAddress", "cuMemAlloc", Out(8), 14000, 0)
        assert (result, address, status) == (0, 0, VERSION_NOT_SUFFICIENT)
        assert (first.result, first.ints) == (NOT_FOUND, [0])
        assert driver.proc("cuMemAlloc", 12000)[1] != address
