"""A group of containers on a stand-in node: its files, an agent that answers, the shim's libraries.

Processes start in the test's directory: the shim under test has a relative path to the files.
"""

import os
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec

from gpu.limits import layout, limits_file, region
from gpu.limits.limits_file import Limit, LimitsFile, Registered
from gpu.limits.region import Region, RegionUse
from tests.standin import build as standin
from tests.standin.gpus import Gpu, Node
from tools import build_shim
from tools.compiling import CHECKOUT

DIRECTORY = "pf-gpu"
BUILT = CHECKOUT / "build/gpu/tests"
ALLOCATION = bytes(range(16))
ANY = 2**64 - 1  # bytes: more than any GPU has


class Libraries(msgspec.Struct, frozen=True):
    """Directories for LD_LIBRARY_PATH: the shim over the stand-ins, and the stand-ins alone."""

    shim: Path
    plain: Path


def libraries(steps: bool = False, real: str = "") -> Libraries:
    """The shim under the driver's name, and the driver under the other, as mounts have them.

    `steps`: of the shim that a test program kills at each step, and which waits less long for the
    agent; `real`: another driver's library.
    """
    plain = standin.libraries()
    defines = [
        f'PF_DIRECTORY="{DIRECTORY}"',
        *(["PF_STEPS", "PF_PATIENCE_MS=1000"] if steps else []),
    ]
    built = build_shim.build("", BUILT / ("steps" if steps else "shim"), defines)
    driver = Path(real) if real else plain / "libcuda.so.1"
    version = "-".join(str(path.stat().st_mtime_ns) for path in (*built, driver))
    directory = BUILT / f"{'steps' if steps else 'over'}-{version}"
    if not directory.exists():
        with tempfile.TemporaryDirectory(dir=BUILT) as made:
            _lay(Path(made), built, plain, driver)
            shutil.copytree(made, f"{made}.done", symlinks=True)
            try:
                Path(f"{made}.done").rename(directory)
            except OSError:  # another worker was first
                shutil.rmtree(f"{made}.done")
    return Libraries(shim=directory, plain=plain)


def _lay(directory: Path, built: Sequence[Path], plain: Path, driver: Path) -> None:
    shutil.copy(built[0], directory / "libcuda.so.1")
    (directory / "libcuda.so").symlink_to("libcuda.so.1")
    shutil.copy(driver, directory / "libpfcuda-real.so.1")
    for path in built[1:]:
        shutil.copy(path, directory / "libnvidia-ml.so.1")
        shutil.copy(plain / "libnvidia-ml.so.1", directory / "libpfnvidia-ml-real.so.1")


def hooked() -> set[str]:
    """The functions that the shim exports."""
    library = build_shim.build()[0]
    text = subprocess.check_output(["nm", "-D", "--defined-only", str(library)], text=True)
    return {line.split()[-1] for line in text.splitlines()}


class Group:
    """The two files and the socket of a group, in `directory`/pf-gpu, and who registered there."""

    def __init__(
        self,
        directory: Path,
        gpu: Gpu,
        memory: int = ANY,
        context: int = 0,
    ) -> None:
        self.directory = directory / DIRECTORY
        (self.directory / "agent").mkdir(parents=True)
        limit = Limit(gpu.uuid, memory, 1.0, context_bytes=context)
        self.limits = self.directory / "limits"
        self.region = self.directory / "region"
        content = limits_file.content_of(limit, ALLOCATION)
        self.limits.write_bytes(content)
        self.region.write_bytes(region.content_of(ALLOCATION))
        self.registered: list[tuple[int, int]] = []  # slot, pid
        self.answer: bytes | None = None  # in place of a right one
        self.answers = threading.Event()  # else those who ask wait
        self.answers.set()
        self._agent: socket.socket | None = None

    def __enter__(self) -> Self:
        self.start_agent()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_agent()

    def start_agent(self) -> None:
        """Listen at the socket, and register everyone who asks."""
        path = self.directory / "agent/agent.sock"
        path.unlink(missing_ok=True)
        self._agent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._agent.bind(str(path))
        self._agent.listen(512)
        threading.Thread(target=self._serve, args=(self._agent,), daemon=True).start()

    def stop_agent(self) -> None:
        """Listen no longer; the socket stays, as after a kill."""
        if self._agent is not None:
            self._agent.shutdown(socket.SHUT_RDWR)
            self._agent.close()
            self._agent = None

    def _serve(self, agent: socket.socket) -> None:
        while True:
            try:
                peer, _ = agent.accept()
            except OSError:
                return
            with peer:
                credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                pid, _, _ = struct.unpack("3i", credentials)
                request = peer.recv(64)
                if not request:  # it only looked whether an agent runs
                    continue
                version, slot = struct.unpack("<II", request)
                assert version == layout.VERSION
                self.answers.wait()
                peer.send(self._answer(slot, pid))

    def _answer(self, slot: int, pid: int) -> bytes:
        if self.answer is not None:
            return self.answer
        self.registered.append((slot, pid))
        registration = len(self.registered)
        self.know(slot, registration, pid, alive=True)
        return struct.pack("<IIQ", 0, pid, registration)

    def know(
        self, slot: int, registration: int, pid: int, *, alive: bool, overhead: int | None = None
    ) -> None:
        """Write what the agent knows of a process."""
        with LimitsFile(self.limits) as opened:
            process = Registered(
                registration=registration,
                host_pid=pid,
                start_time=0,
                alive=alive,
                overhead_bytes=overhead,
            )
            opened.write(processes={slot: process})

    def bury(self, pid: int) -> None:
        """Say that a process is dead."""
        for registration, (slot, of) in enumerate(self.registered, 1):
            if of == pid:
                self.know(slot, registration, pid, alive=False)

    def set_memory(self, memory: int) -> None:
        """Change the limit."""
        with LimitsFile(self.limits) as opened:
            opened.write(msgspec.structs.replace(opened.limit(), memory_bytes=memory))

    def use(self) -> RegionUse:
        """The use of the GPU that the shims report."""
        with Region(self.region, ALLOCATION) as opened:
            return opened.use()

    @property
    def used(self) -> int:
        """Bytes on the GPU."""
        return self.use().used_bytes

    def slots(self) -> dict[int, int]:
        """Bytes of data, for each used slot."""
        with Region(self.region, ALLOCATION) as opened:
            return {slot: use.data_bytes for slot, use in opened.slots(range(layout.SLOTS)).items()}


def environment(node: Node, libraries: Libraries) -> dict[str, str]:
    """The environment in which a process finds the shim before the node's driver."""
    return {**node.environment, "LD_LIBRARY_PATH": str(libraries.shim), "HOME": os.sep}
