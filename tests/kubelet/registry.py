"""The kubelet's plugin watcher, on plugins_registry/."""

import os
import stat
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from deviceplugin.api import pluginregistration_pb2 as api
from deviceplugin.api import pluginregistration_pb2_grpc
from deviceplugin.kubelet.channels import open_channel
from tests.waiting import PATIENCE  # the kubelet waits for 1 s and 5 s

if TYPE_CHECKING:
    from tests.kubelet.kubelet import Kubelet

EVERY = 0.05  # seconds between looks; the kubelet has inotify


class Registry:
    """Registers the plugins whose sockets appear, and drops those whose sockets vanish."""

    def __init__(self, kubelet: "Kubelet") -> None:
        self._kubelet = kubelet
        self._directory = kubelet.root / "plugins_registry"
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start. All existing sockets count as new."""
        self._ended.clear()
        self._thread = threading.Thread(target=self._run, name="kubelet-registry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop. The sockets stay, as when a kubelet ends."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        known: dict[Path, tuple[int, Path]] = {}  # inode and endpoint, by socket
        while not self._ended.wait(EVERY):
            found = self._sockets()
            for path in [path for path in known if found.get(path) != known[path][0]]:
                self._kubelet.deregister(known.pop(path)[1])
            for path in found.keys() - known.keys():
                known[path] = found[path], self._register(path)

    def _sockets(self) -> dict[Path, int]:
        """All that are there. What vanishes during the look hides none of the others."""
        found = {}
        for directory, _, names in os.walk(self._directory):
            for path in (Path(directory, name) for name in names if not name.startswith(".")):
                with suppress(FileNotFoundError):
                    status = path.lstat()
                    if stat.S_ISSOCK(status.st_mode):
                        found[path] = status.st_ino
        return found

    def _register(self, path: Path) -> Path:
        """Accept or refuse a plugin; return its endpoint."""
        endpoint = path
        with open_channel(path) as channel:
            stub = pluginregistration_pb2_grpc.RegistrationStub(channel)  # type: ignore[no-untyped-call]
            try:
                info = stub.GetInfo(api.InfoRequest(), timeout=PATIENCE)
                self._kubelet.record("GetInfo", info.name, [info.endpoint])
                endpoint = Path(info.endpoint) if info.endpoint else path
                if info.type != "DevicePlugin" or "v1beta1" not in info.supported_versions:
                    raise ValueError(f"no handler registered for plugin type: {info.type}")
                self._kubelet.register(info.name, endpoint)
            except (grpc.RpcError, grpc.FutureTimeoutError, ValueError) as error:
                status = api.RegistrationStatus(plugin_registered=False, error=str(error))
            else:
                status = api.RegistrationStatus(plugin_registered=True)
            with suppress(grpc.RpcError):
                stub.NotifyRegistrationStatus(status, timeout=PATIENCE)
        return endpoint
