"""The gate of gpu/shim by itself, with a made-up clock and driver, and in processes of its own."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from gpu.limits import layout
from tools.compiling import CHECKOUT, compiled

US, MS, S = 1_000, 1_000_000, 1_000_000_000  # nanoseconds
WHOLE = 10_000
KAPPA = 1 << 16
UNKNOWN = 20 * US  # what a launch costs before its kernel is measured
KERNEL, GRAPH = 0, 1

_SHIM = CHECKOUT / "gpu/shim"
_PROGRAMS = Path(__file__).parent / "programs"
_FLAGS = ["-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", f"-I{_SHIM}"]
_SLEPT = ctypes.CFUNCTYPE(None, ctypes.c_uint64)


def _compiled(name: str, source: str, *flags: str) -> Path:
    sources = [_PROGRAMS / source, _SHIM / "gate.c", _SHIM / "estimates.c", _SHIM / "timings.c"]
    command = ["gcc", *_FLAGS, *flags, *map(str, sources)]
    made_from = [*sources, *_SHIM.glob("*.h")]
    return compiled(command, CHECKOUT / "build/gpu/tests" / name, made_from)


def library() -> Path:
    """The gate with a made-up clock and driver."""
    return _compiled(
        "gate-clock.so", "gate_clock.c", "-DPF_CLOCK", "-fPIC", "-shared", "-fvisibility=hidden"
    )


def program() -> Path:
    """A process that launches, by the real clock."""
    return _compiled("gate-time", "gate_time.c")


class Gate:
    """A process of a group with one GPU, whose time passes only as a test says."""

    def __init__(
        self, directory: Path, share: int = 5000, now: int = 1000 * S, *, measures: bool = True
    ) -> None:
        copy = directory / f"gate-{len(list(directory.iterdir()))}.so"
        shutil.copy(library(), copy)  # one of each name is loaded
        self._library = ctypes.CDLL(str(copy))
        self._launch = self._library.launch
        self._launch.argtypes = [
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int),
        ]
        self._launch.restype = ctypes.c_uint64
        self._slept = _SLEPT()
        self.limit = layout.PfGpuLimit()
        self.limit.share, self.limit.kappa = share, KAPPA
        self.limit.burst_ns, self.limit.most_debt_ns = 20 * MS, 60 * S
        self.gpu = layout.PfGpu()
        self.now = now
        if not measures:
            self.set("create_result", 801)

    def launch(
        self,
        what: int = 1,
        ns: int = UNKNOWN,
        *,
        kind: int = KERNEL,
        stream: int = 0,
        result: int = 0,
    ) -> int:
        """Launch what takes so long; when the driver got it, relative to the call."""
        before = self.now
        limit = ctypes.addressof(self.limit)
        gpu = ctypes.addressof(self.gpu)
        at: int = self._launch(limit, gpu, kind, what, stream, ns, result)
        return at - before

    def know(self, what: int, ns: int, *, kind: int = KERNEL) -> None:
        """Let the gate measure a kernel until it knows how long it takes; then all is paid."""
        for _ in range(4):
            self.launch(what, ns, kind=kind)
            self.now = max(self.now, self.number("stream_free")) + MS
        self.launch(what, ns, kind=kind)  # which takes the last measurement
        self.now = max(self.now, self.gpu.tat, self.number("stream_free")) + S

    def while_sleeping(self, call: Callable[[int], object]) -> None:
        """Call that in each sleep of the gate, with the time at which it will end."""
        self._slept = _SLEPT(call)
        ctypes.c_void_p.in_dll(self._library, "slept").value = ctypes.cast(
            self._slept,
            ctypes.c_void_p,
        ).value

    def forget_events(self) -> None:
        """As before a context is destroyed."""
        self._library.forget_events()

    def number(self, name: str) -> int:
        """A variable of gate_clock.c."""
        kind = _KINDS.get(name, ctypes.c_int)
        return int(kind.in_dll(self._library, name).value)

    def set(self, name: str, value: int) -> None:
        """Set such a variable."""
        _KINDS.get(name, ctypes.c_int).in_dll(self._library, name).value = value

    def name(self, *, function: bytes | None = None, kernel: bytes | None = None) -> None:
        """Set the name that the driver reports for every function, or for every kernel."""
        ctypes.c_char_p.in_dll(self._library, "function_name").value = function
        ctypes.c_char_p.in_dll(self._library, "kernel_name").value = kernel

    @property
    def now(self) -> int:
        """The clock, ns."""
        return self.number("now")

    @now.setter
    def now(self, value: int) -> None:
        self.set("now", value)

    @property
    def debt(self) -> int:
        """For how long the group would have to wait, ns; negative: it has a burst left."""
        return int(self.gpu.tat) - self.now


_KINDS: dict[str, type[ctypes.c_uint64]] = dict.fromkeys(
    ("now", "stream_free", "other_free", "longest_sleep", "spun"), ctypes.c_uint64
)


class Files:
    """The two files of a group with one GPU, for processes of `program`."""

    def __init__(self, directory: Path, share: int) -> None:
        self.limits, self.region = directory / "limits", directory / "region"
        self._of_limits, self._of_region = layout.PfLimits(), layout.PfRegion()
        limit = self._of_limits.gpu
        limit.share, limit.kappa = share, KAPPA
        limit.burst_ns, limit.most_debt_ns = 20 * MS, 60 * S
        self._write_limits()
        self.region.write_bytes(bytes(self._of_region))

    def set_share(self, share: int) -> None:
        """As the agent does it: in place."""
        self._of_limits.gpu.share = share
        self._write_limits()

    def set_most_debt(self, ns: int) -> None:
        """Set how far `tat` may be in the future."""
        self._of_limits.gpu.most_debt_ns = ns
        self._write_limits()

    def set_tat(self, tat: int) -> None:
        """Set the group's theoretical arrival time."""
        with self.region.open("r+b") as opened:
            opened.seek(layout.USE_AT + layout.PfGpu.tat.offset)
            opened.write(tat.to_bytes(8, "little"))

    def gpu(self) -> layout.PfGpu:
        """The region's fields for the GPU."""
        return layout.PfGpu.from_buffer_copy(self.region.read_bytes(), layout.USE_AT)

    def _write_limits(self) -> None:
        with self.limits.open("r+b" if self.limits.exists() else "wb") as opened:
            opened.write(bytes(self._of_limits))

    def start(self, kind: str, count: int) -> subprocess.Popen[str]:
        """Start a process; its first line says that it launches now."""
        command = [str(program()), str(self.limits), str(self.region), kind, str(count)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
