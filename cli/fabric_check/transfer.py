"""A small transfer over verbs: perftest's ib_write_bw, which can use a P_Key by its index.

The programs of two pods agree over TCP on the tested interface. The server program ends after one
transfer. Source: perftest's man pages.
"""

import subprocess
import time
from collections.abc import Iterator
from ipaddress import ip_address

import msgspec

from base.paths import Paths
from host.netlink.links import Link
from host.sysfs import attribute_files, infiniband, pci

PROGRAM = "ib_write_bw"
SIZE, NUMBER = 65536, 20  # 1.3 MB in all
SECONDS = 10.0  # of one transfer
_PAUSE = 0.5  # seconds, after an end of the server program


class VerbsPort(msgspec.Struct, frozen=True):
    """The port for transfers, with the indices of the P_Key and the GID.

    `pkey` is -1 if the port's table lacks the P_Key. `gid` is -1 for the program's own choice.
    """

    device: str
    number: int = 1
    pkey: int = 0
    gid: int = -1

    def options(self, tcp_port: int) -> list[str]:
        options = ["-d", self.device, "-i", str(self.number), "-p", str(tcp_port)]
        options += ["-F", "-s", str(SIZE), "-n", str(NUMBER), f"--pkey_index={self.pkey}"]
        return [*options, "-x", str(self.gid)] if self.gid >= 0 else options


def port_of(paths: Paths, link: Link, address: str, number: int) -> VerbsPort | None:
    """The port of an interface, among the HCAs whose device nodes this pod has; `None` without one.

    If no port belongs to the interface, takes the pod's HCA of the same number.
    """
    nodes = attribute_files.names(str(paths.dev / "infiniband"))
    held = sorted(rdma for rdma, (node, *_) in pci.uverbs_numbers(paths).items() if node in nodes)
    if link.pkey and (own := infiniband.port_of(paths, link)) and own.hca in held:
        slot = infiniband.pkey_slot(paths, own.hca, own.number, link.pkey)
        return VerbsPort(own.hca, own.number, pkey=slot[0] if slot else -1)
    default = VerbsPort(held[min(number, len(held) - 1)]) if held else None
    return next(_with_gid(paths, held, address), default)


def _with_gid(paths: Paths, held: list[str], address: str) -> Iterator[VerbsPort]:
    """Yield the RoCE ports that have a GID of the address."""
    gid = ip_address(address if ":" in address else f"::ffff:{address}").exploded
    for device in held:
        for path in (paths.sys / f"class/infiniband/{device}/ports").glob("*/gids/*"):
            port = path.parents[1]
            kind = attribute_files.text(f"{port}/gid_attrs/types/{path.name}")
            if kind == "RoCE v2" and attribute_files.text(str(path)) == gid:
                yield VerbsPort(device, int(port.name), gid=int(path.name))


def serve(port: VerbsPort, tcp_port: int) -> None:
    """Run the server program again and again, until the pod ends."""
    quiet = subprocess.DEVNULL
    while True:
        try:
            subprocess.run([PROGRAM, *port.options(tcp_port)], stdout=quiet, stderr=quiet)
        except OSError:  # the other pod reports that its own program is missing, or no server
            return
        time.sleep(_PAUSE)


def failure(port: VerbsPort, tcp_port: int, address: str) -> str:
    """Transfer to another pod. Returns the reason if the transfer failed, else ""."""
    command = [PROGRAM, *port.options(tcp_port), address]
    until = time.monotonic() + SECONDS
    said = ""
    while (left := until - time.monotonic()) > 0:
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=left, errors="replace"
            )
        except subprocess.TimeoutExpired:
            return f"{PROGRAM} on {port.device} did not end within {SECONDS:g} s"
        except OSError as error:
            return f"{PROGRAM} does not start: {error.strerror}"
        if done.returncode == 0:
            return ""
        said = " ".join((done.stderr or done.stdout).split())[-100:]
        time.sleep(_PAUSE)  # the server program starts again
    return f"{PROGRAM} on {port.device} failed: {said}"
