"""A pool to serve, and a plugin process of it: `python -m tests.host.deviceplugin.pool ROOT`."""

import os
import signal
import sys
import threading
from pathlib import Path

import grpc

from base.paths import Paths
from deviceplugin.api import v1beta1_pb2
from deviceplugin.kubelet.plugin_server import Listing, Rejected, ServedPool
from deviceplugin.kubelet.registration import PluginServer

NAME = "rdma/hca"


class Pool(ServedPool):
    """Devices "0".."n-1", all healthy. Calls whose names are in `broken` fail."""

    def __init__(self, count: int = 4, name: str = NAME, numa: tuple[int, ...] = ()) -> None:
        super().__init__(name)
        self.devices: Listing = [(str(number), True, numa) for number in range(count)]
        self.broken: set[str] = set()
        self.preferences: list[tuple[list[str], list[str], int]] = []
        self.started: list[list[str]] = []

    def listing(self) -> Listing:
        self._perhaps_fail("listing")
        return list(self.devices)

    def set(self, device_id: str, healthy: bool) -> None:
        """Change a device's health without notifying the plugin."""
        self.devices = [
            (name, healthy if name == device_id else was, numa) for name, was, numa in self.devices
        ]

    def preferred(self, available: list[str], must_include: list[str], size: int) -> list[str]:
        self._perhaps_fail("preferred")
        self.preferences.append((available, must_include, size))
        return sorted(available, reverse=True)[:size]

    def allocate(self, ids: list[str]) -> v1beta1_pb2.ContainerAllocateResponse:
        self._perhaps_fail("allocate")
        health = {device_id: healthy for device_id, healthy, _ in self.devices}
        for device_id in ids:
            if device_id not in health:
                raise Rejected(
                    grpc.StatusCode.INVALID_ARGUMENT, f"{device_id}: the pool has no such device"
                )
            if not health[device_id]:
                raise Rejected(grpc.StatusCode.FAILED_PRECONDITION, f"{device_id}: is not healthy")
        return v1beta1_pb2.ContainerAllocateResponse(envs={"IDS": ",".join(sorted(ids))})

    def pre_start(self, ids: list[str]) -> None:
        self._perhaps_fail("pre_start")
        self.started.append(ids)

    def _perhaps_fail(self, name: str) -> None:
        if name in self.broken:
            raise RuntimeError(f"{name} is broken")


def main() -> None:
    """Serve until SIGTERM; print a line once it runs."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    server = PluginServer(Paths(kubelet=Path(sys.argv[1])), Pool())
    server.start()
    os.write(1, b"started\n")
    ended.wait()
    server.close()


if __name__ == "__main__":
    main()
