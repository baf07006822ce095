"""A node with GPUs that are stand-ins: its GPUs, its driver's behaviour, its accounts.

Processes find the node through the environment variable PODFABRIC_STANDIN_GPUS, and the libraries
through LD_LIBRARY_PATH (`Node.environment`). No two nodes share anything. Without the variable,
processes use the machine's own node, in `OF_MACHINE`.
"""

import ctypes
import functools
import os
import re
from pathlib import Path
from typing import Self

import msgspec

from tests.standin import build

OF_MACHINE = Path("/run/standin-gpus")
"""The directory of the files of a machine that has one driver."""

MIB = 2**20
GIB = 2**30
MOST_GPUS = 8
KINDS = ("context", "module", "linear", "managed", "array", "pool", "physical", "graph")
UNLIMITED = 2**64 - 1
TABLES = ("exports.def", "unsupported.def")


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. `bytes` is all of its memory (NVML's total), `reserved_bytes` the driver's."""

    uuid: str
    pci: str
    name: str = "Stand-in H200"
    bytes: int = 8 * GIB
    reserved_bytes: int = 0
    context_bytes: int = 0  # memory of each context
    module_bytes: int = 0  # memory of each loaded module
    minor: int = 0


class Failure(msgspec.Struct, frozen=True):
    """The n-th call (1 is the first) of an export in each process gives this result.

    `result` is a number of CUresult or nvmlReturn_t, or "kill": the process is killed before the
    call takes effect.
    """

    call: str
    nth: int
    result: int | str


class Behaviour(msgspec.Struct, frozen=True, kw_only=True):
    """How the driver behaves; times are in nanoseconds."""

    driver: str = "615.20.01"
    cuda: int = 13050  # the newest version that it supports: 1000 · major + 10 · minor
    reuse_addresses: bool = False  # otherwise a use of freed memory is detected and aborts
    reenter: bool = False  # exports call each other, as in a library linked without -Bsymbolic
    slice_ns: int = 2_000_000
    sample_ns: int = 166_666_667
    pool_chunk: int = 32 * MIB
    pitch: int = 512
    listed: str = "compute"  # the NVML list with the processes, or "graphics", or "mps"
    nodes: str | None = None  # directory of /dev/nvidiaN; a process has those it can open
    latency_ns: dict[str, int] = {}  # per export, or "*" for all further ones
    failures: tuple[Failure, ...] = ()


class Use(msgspec.Struct, frozen=True):
    """One process on one GPU: bytes of each of KINDS, and work in nanoseconds of GPU time."""

    held: tuple[int, ...]
    peak: int
    contexts: int
    launches: int
    busy_ns: int
    backlog_ns: int
    queued: int

    @property
    def bytes(self) -> int:
        return sum(self.held)

    def of(self, kind: str) -> int:
        return self.held[KINDS.index(kind)]


class Process(msgspec.Struct, frozen=True):
    """A process that loaded libcuda. The record of a dead process stays readable."""

    pid: int
    alive: bool
    initialised: bool
    not_found: int  # look-ups by cuGetProcAddress that found nothing
    calls: dict[int, int]
    gpus: tuple[Use, ...]

    def called(self, symbol: str) -> int:
        """The number of its calls of an export."""
        return self.calls.get(exports().index(symbol), 0)


class Held(msgspec.Struct, frozen=True):
    """A GPU: bytes that living processes hold, and the maximum that they held at once."""

    resident: int
    peak: int
    time_ns: int


class Accounts(msgspec.Struct, frozen=True):
    """The contents of the node's GPUs at one moment."""

    gpus: tuple[Held, ...]
    processes: tuple[Process, ...]

    def process(self, pid: int) -> Process:
        """The newest process with that pid."""
        return [one for one in self.processes if one.pid == pid][-1]


class Node:
    """A node's GPUs, in files below `directory`."""

    def __init__(self, directory: Path, gpus: tuple[Gpu, ...], behaviour: Behaviour) -> None:
        assert len(gpus) <= MOST_GPUS
        self.gpus = gpus
        self.file = directory / "gpus.json"
        self.state = directory / "gpus.state"
        self.file.write_bytes(described(directory, gpus, behaviour))
        self._open(behaviour)

    @classmethod
    def found(cls, directory: Path = OF_MACHINE) -> "Node":
        """The node whose files already exist below `directory`."""
        node = cls.__new__(cls)
        node.file, node.state = directory / "gpus.json", directory / "gpus.state"
        content = node.file.read_bytes()
        node.gpus = msgspec.json.decode(content, type=_Described).gpus
        node._open(msgspec.json.decode(content, type=Behaviour))
        return node

    def _open(self, behaviour: Behaviour) -> None:
        self._oracle = _library().oracle_open(
            os.fsencode(self.state), behaviour.slice_ns, behaviour.sample_ns
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _library().oracle_close(self._oracle)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a process on this node."""
        return {
            "PODFABRIC_STANDIN_GPUS": str(self.file),
            "LD_LIBRARY_PATH": str(build.libraries()),
        }

    def read(self) -> Accounts:
        """The accounts, read under their lock at one moment."""
        text = _library().oracle_read(self._oracle)
        try:
            return msgspec.json.decode(ctypes.string_at(text), type=Accounts)
        finally:
            _library().oracle_free(text)

    def happens(self, gpu: int, *, xid: int | None = None) -> None:
        """Send an event of a GPU to all processes that watch: a critical Xid, or an ECC error."""
        event = (2, 0) if xid is None else (8, xid)
        with self.state.with_suffix(".state.events").open("a") as file:
            print(gpu, *event, file=file)

    def counts(self, what: str, *numbers: int) -> None:
        """Set each GPU's counter in the driver: uncorrected `errors`, or its `recovery` action."""
        new = self.state.with_suffix(".state.new")
        new.write_text(" ".join(map(str, numbers)))
        new.replace(self.state.with_suffix(f".state.{what}"))


def described(directory: Path, gpus: tuple[Gpu, ...], behaviour: Behaviour) -> bytes:
    """The content of gpus.json in the directory of a node's files."""
    return msgspec.json.encode(
        {
            "state": str(directory / "gpus.state"),
            "gpus": gpus,
            **{name: getattr(behaviour, name) for name in behaviour.__struct_fields__},
        }
    )


class _Described(msgspec.Struct):
    gpus: tuple[Gpu, ...]


def gpus(count: int, **of_each: object) -> tuple[Gpu, ...]:
    """GPUs with unique UUIDs and PCI addresses, in the order of both."""
    common = msgspec.to_builtins(of_each)
    return tuple(
        msgspec.convert(
            {
                "uuid": f"GPU-{index:08x}-57a0-4d1e-8000-00000000{index:04x}",
                "pci": f"00000000:{0x10 + index:02X}:00.0",
                "minor": index,
                **common,
            },
            Gpu,
        )
        for index in range(count)
    )


@functools.cache
def exports() -> list[str]:
    """The symbols of libcuda in the order of the tables, which is the index of their call
    counts."""
    return [symbol for _, _, symbol, _ in table()]


@functools.cache
def table() -> list[tuple[str, int, str, bool]]:
    """Rows of the tables: base name, CUDA version of the ABI, symbol, is a per-thread variant."""
    row = re.compile(r"^EXPORT\((\w+), (\d+), (\w+), ([01])\)$", re.MULTILINE)
    text = "".join((build.HERE / "cuda" / name).read_text() for name in TABLES)
    found = [
        (base, int(version), symbol, own == "1") for base, version, symbol, own in row.findall(text)
    ]
    assert len(found) == text.count("EXPORT(") - text.count(" EXPORT("), "a row that is not read"
    return found


_oracle: list[ctypes.CDLL] = []


def _library() -> ctypes.CDLL:
    if not _oracle:
        library = ctypes.CDLL(str(build.libraries() / "liboracle.so"))
        library.oracle_open.restype = ctypes.c_void_p
        library.oracle_open.argtypes = (ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64)
        library.oracle_close.argtypes = (ctypes.c_void_p,)
        library.oracle_read.restype = ctypes.c_void_p
        library.oracle_read.argtypes = (ctypes.c_void_p,)
        library.oracle_free.argtypes = (ctypes.c_void_p,)
        _oracle.append(library)
    return _oracle[0]
