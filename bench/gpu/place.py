"""The place where bench/gpu.sh measures: a driver, the library of gpu/shim over it, and groups.

The driver is the machine's, or the stand-in of the tests. The agent registers every client: a
machine for measurements has no pods. It needs Python 3.11, msgspec and a C compiler, and
nvidia-ml-py if the GPU's time is shared.

A printed line is "ROW what: figure | target | ok, miss, or skipped: why". A figure that is
compared with the same call without the libraries is their additional cost; (x1.17) is the ratio.
"""

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, chdir
from pathlib import Path

import msgspec

from gpu.limits.limits_file import LimitsFile
from tests.gpu import group as groups
from tests.gpu.group import Group
from tests.standin.gpus import GIB, MIB, Behaviour, Gpu, Node, gpus
from tools import build_shim
from tools.compiling import CHECKOUT, compiled

SOURCE = Path(__file__).with_name("device.c")
DRIVER = CHECKOUT / "tests/gpu/programs/driver.h"
LIMIT, CONTEXT, PIECE = 8 * GIB, 400 * MIB, 64 * MIB
NVML = "libnvidia-ml.so.1"


def line(row: str, what: str, value: str, target: str, verdict: bool | str) -> None:
    """Print a result. A text as the verdict is the reason why it was skipped."""
    said = f"skipped: {verdict}" if isinstance(verdict, str) else "ok" if verdict else "miss"
    print(f"{row:4} {what}: {value} | {target} | {said}", flush=True)


def figure(
    row: str, what: str, value: float, unit: str, target: float, ratio: float | None = None
) -> None:
    """Print a number that should be no more than its target."""
    shown = f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"
    compared = f" (x{ratio:.2f})" if ratio is not None else ""
    line(row, what, f"{shown} {unit}{compared}", f"{target:g} {unit}", value <= target)


class BenchGroup:
    """A group with its own directory, in which its processes start."""

    def __init__(self, place: "Place", name: str, memory: int, share: float, context: int) -> None:
        self.place = place
        self.directory = place.directory / name
        self.directory.mkdir()
        self.group = Group(self.directory, place.gpu, memory, context)
        self.group.start_agent()
        self.set_share(share)

    def set_share(self, share: float, kappa: float = 1.0, settled: float = 0.0) -> None:
        """Set the gate's share of the GPU's time, in (0, 1], and its debt in seconds."""
        with LimitsFile(self.group.limits) as opened:
            limit = opened.limit()
            owed = round(settled * 1e9)
            changed = msgspec.structs.replace(
                limit, compute_share=share, kappa=kappa, settled_ns=owed
            )
            opened.write(changed)

    def start(self, *words: str, shim: bool = True, **variables: str) -> "subprocess.Popen[str]":
        """Start bench/gpu/device.c's program."""
        return self.popen([str(self.place.program), *words], shim=shim, **variables)

    def popen(
        self, command: Sequence[str], *, shim: bool = True, **variables: str
    ) -> "subprocess.Popen[str]":
        """Start a program, with the shim or without it."""
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.directory,
            env={**self.place.environment(shim=shim), **variables},
        )

    def say(self, *words: str, shim: bool = True, **variables: str) -> str:
        """The output of the program. Raises RuntimeError if it fails."""
        return finished(self.start(*words, shim=shim, **variables))


class Place:
    """A machine with a driver; `close` ends its use."""

    def __init__(self, directory: Path, real: Path | None) -> None:
        self.directory = directory
        self.real = real
        self._stack = ExitStack()
        self._stack.enter_context(chdir(directory))
        self.node: Node | None = None
        if real is None:
            cards = gpus(1, bytes=64 * GIB, context_bytes=300 * MIB)
            behaviour = Behaviour(reuse_addresses=True)
            self.node = self._stack.enter_context(Node(directory, cards, behaviour))
            self._shim, self._plain = groups.libraries().shim, str(groups.libraries().plain)
        else:
            self._shim, self._plain = _laid(directory / "shim", real), ""
        command = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", str(SOURCE), "-ldl"]
        self.program = compiled(command, groups.BUILT / "gpu_device", [SOURCE, DRIVER])
        self.gpu = self.node.gpus[0] if self.node is not None else self._asked()

    def close(self) -> None:
        """Leave the directory."""
        self._stack.close()

    def environment(self, *, shim: bool) -> dict[str, str]:
        """The environment in which a process finds the shim, or the driver alone."""
        of_node: Mapping[str, str] = self.node.environment if self.node is not None else {}
        path = os.environ.get("LD_LIBRARY_PATH", "")
        first = str(self._shim) if shim else self._plain
        return {**os.environ, **of_node, "LD_LIBRARY_PATH": ":".join(filter(None, (first, path)))}

    def group(
        self, name: str, *, memory: int = 2**64 - 1, share: float = 1.0, context: int = 0
    ) -> BenchGroup:
        """A new group. Limits and `context`, the memory that a context counts as, are bytes."""
        return BenchGroup(self, name, memory, share, context)

    def _asked(self) -> Gpu:
        text = subprocess.check_output(
            [str(self.program), "uuid"], env=self.environment(shim=False), text=True
        )
        return Gpu(uuid=f"GPU-{uuid.UUID(text.strip())}", pci="")


def numbers(text: str) -> list[float]:
    """The numbers that a program printed."""
    return [float(word) for word in text.split()]


def begin(processes: Iterable["subprocess.Popen[str]"]) -> None:
    """Write the line for which each process waits."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def finished(process: "subprocess.Popen[str]", given: str = "", *, patience: int = 600) -> str:
    """The complete output of a process, after its end. Raises RuntimeError if it failed."""
    try:
        out, err = process.communicate(given, timeout=patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise RuntimeError(f"it did not end within {patience} s") from None
    if process.returncode != 0:
        lines = err.strip().splitlines() or [f"exit code {process.returncode}"]
        raise RuntimeError(lines[-1])
    return out


def _laid(directory: Path, real: Path) -> Path:
    """The shims under the driver's names, and the driver's files under the shims' second names."""
    directory.mkdir()
    built = build_shim.build(
        "", CHECKOUT / "build/gpu/bench", [f'PF_DIRECTORY="{groups.DIRECTORY}"']
    )
    for path, name, second, beside in (
        (built[0], "libcuda.so.1", "libpfcuda-real.so.1", real),
        (built[1], NVML, "libpfnvidia-ml-real.so.1", real.with_name(NVML)),
    ):
        if beside.exists():
            shutil.copy(path, directory / name)
            (directory / second).symlink_to(beside.resolve())
    return directory
