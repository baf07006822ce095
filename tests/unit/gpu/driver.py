"""NVIDIA's driver as a node shows it: its /proc files and its device nodes, made up."""

import os
import shutil
import stat

from base.paths import Paths
from tests.unit.host.servers import gpu_uuid

MAJOR = 195
UVM = 511


class Driver:
    """The driver below some roots. Nothing is there before `load`."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths

    def load(self, count: int, *, tools: bool = True) -> None:
        """Show `count` GPUs, at addresses 0000:10:00.0, 0000:11:00.0, ..., with all nodes."""
        for number in range(count):
            self.gpu(number)
        self.nodes(range(count), tools=tools)

    def gpu(self, number: int, address: str = "") -> str:
        """Show a GPU in /proc; its address."""
        address = address or f"0000:{0x10 + number:02x}:00.0"
        directory = self.paths.proc / "driver/nvidia/gpus" / address
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "information").write_text(
            f"Model: \t\t NVIDIA H200\nGPU UUID: \t {gpu_uuid(number)}\n"
            f"Bus Location: \t {address}\nDevice Minor: \t {number}\n"
        )
        return address

    def nodes(self, minors: range, *, tools: bool = True) -> None:
        """Make the device nodes of these GPUs, and those for all."""
        for minor in minors:
            self.node(f"nvidia{minor}", MAJOR, minor)
        self.node("nvidiactl", MAJOR, 255)
        self.node("nvidia-uvm", UVM, 0)
        if tools:
            self.node("nvidia-uvm-tools", UVM, 1)

    def node(self, name: str, major: int, minor: int) -> None:
        """Make a device node."""
        path = self.paths.dev / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))

    def unload(self) -> None:
        """Take all of it away."""
        shutil.rmtree(self.paths.proc / "driver/nvidia", ignore_errors=True)
        for path in self.paths.dev.glob("nvidia*"):
            path.unlink()
