"""A small transfer over verbs: perftest's ib_write_bw, which can use a P_Key by its index.

The programs of two pods agree over TCP on the tested interface. The server program ends after one
transfer. Sources: perftest's man pages, Documentation/ABI/stable/sysfs-class-infiniband.
"""

import subprocess
import threading
import time
from collections.abc import Iterator
from ipaddress import ip_address

import msgspec

from base.paths import Paths
from cli.fabric_check.ring import Rail
from host.sysfs import attribute_files
from host.sysfs.infiniband import FULL_MEMBER

PROGRAM = "ib_write_bw"
SIZE, NUMBER = 65536, 100  # 6.5 MB in all
SECONDS = 10.0  # of one transfer
_PAUSE = 0.5  # seconds, after an end of the server program
_ROCE = "RoCE v2"


class VerbsPort(msgspec.Struct, frozen=True):
    """The port for transfers. -1 means that the table lacks the P_Key, or that no GID fits."""

    device: str
    number: str
    pkey: int = 0
    gid: int = -1

    def options(self, tcp_port: int) -> list[str]:
        options = ["-d", self.device, "-i", self.number, "-p", str(tcp_port), "-F"]
        options += ["-s", str(SIZE), "-n", str(NUMBER)]
        options += ["-x", str(self.gid)] if self.gid >= 0 else []
        return [*options, f"--pkey_index={self.pkey}"] if self.pkey > 0 else options


def port_of(paths: Paths, rail: Rail, number: int, pkey: str) -> VerbsPort | None:
    """The port of an interface, among the HCAs whose device nodes this pod has; `None` without one.

    If no GID belongs to the interface, takes the pod's HCA of the same number.
    """
    held = sorted(_held(paths))
    if not held:
        return None
    for device in held:
        ports = f"{paths.sysfs}/class/infiniband/{device}/ports"
        for each in sorted(attribute_files.names(ports)):
            if (gid := _gid(f"{ports}/{each}", rail)) is not None:
                return _with_pkey(paths, VerbsPort(device, each, gid=gid), pkey)
    return _with_pkey(paths, VerbsPort(held[min(number, len(held) - 1)], "1"), pkey)


def _held(paths: Paths) -> Iterator[str]:
    for node in attribute_files.names(str(paths.dev / "infiniband")):
        if node.startswith("uverbs"):
            at = f"{paths.sysfs}/class/infiniband_verbs/{node}/ibdev"
            if device := attribute_files.text(at):
                yield device


def _gid(port: str, rail: Rail) -> int | None:
    """The index of the interface's GID: -1 on InfiniBand, which uses LIDs; `None` without one."""
    own = ip_address(rail.address)
    mapped = own.packed.hex() if own.version == 6 else f"{'ffff':0>24}{own.packed.hex()}"
    guid = rail.mac.replace(":", "")[-16:] if len(rail.mac) > 17 else ""  # of 20 bytes
    found = None
    for index in sorted(int(n) for n in attribute_files.names(f"{port}/gids") if n.isdecimal()):
        gid = attribute_files.text(f"{port}/gids/{index}").replace(":", "")
        if guid and gid[-16:] == guid:
            return -1
        netdev = attribute_files.text(f"{port}/gid_attrs/ndevs/{index}")
        if gid == mapped or (netdev == rail.interface and gid.strip("0")):
            if attribute_files.text(f"{port}/gid_attrs/types/{index}") == _ROCE:
                return index
            found = index if found is None else found
    return found


def _with_pkey(paths: Paths, port: VerbsPort, pkey: str) -> VerbsPort:
    at = f"{paths.sysfs}/class/infiniband/{port.device}/ports/{port.number}"
    if not pkey or attribute_files.text(f"{at}/link_layer") != "InfiniBand":
        return port
    table = ((n, attribute_files.number(f"{at}/pkeys/{n}") or 0) for n in range(128))
    same = (n for n, each in table if each and not (each ^ int(pkey, 16)) & ~FULL_MEMBER)
    return msgspec.structs.replace(port, pkey=next(same, -1))


def serve(port: VerbsPort, tcp_port: int, ended: threading.Event) -> None:
    """Run the server program again and again until `ended`."""
    while not ended.is_set():
        try:
            process = subprocess.Popen(
                [PROGRAM, *port.options(tcp_port)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError:  # the other pod reports that its own program is missing, or no server
            return
        while process.poll() is None and not ended.wait(_PAUSE):
            pass
        process.kill()
        process.wait()


def failure(port: VerbsPort, tcp_port: int, address: str, seconds: float = SECONDS) -> str:
    """Transfer to another pod. Returns the reason if the transfer failed, else ""."""
    command = [PROGRAM, *port.options(tcp_port), address]
    until = time.monotonic() + min(seconds, SECONDS)
    said = "no time was left"
    while (left := until - time.monotonic()) > 0:
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=left, check=False, errors="replace"
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
