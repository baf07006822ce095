"""The device plugin as the agent, or `podfabric device-plugin`, runs it.

It waits for a kubelet's directory to be there: a node without a kubelet pays for nothing, for
gRPC is a third of an agent's memory. A configuration that is wrong is told and does not count.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from deviceplugin.config import Config, ConfigError
from host.paths import Paths
from host.watching import Watched

if TYPE_CHECKING:
    from deviceplugin.manager import DevicePlugin
    from deviceplugin.server import State

LOOK_EVERY = 1.0  # seconds, for a kubelet's directory

_log = logging.getLogger(__name__)


class Service:
    """Serves what `load` says, from `start` to `close`; again whenever `file` changes."""

    def __init__(self, paths: Paths, load: Callable[[], Config], file: Path | None) -> None:
        self._paths = paths
        self._load = load
        self._file = file
        self._wrong = ""
        self._config: Config | None = None
        self._lock = threading.Lock()
        self._plugin: DevicePlugin | None = None
        self._watched: Watched | None = None
        self._ended = threading.Event()
        self._only_one = FileLock(paths.devices / "plugin.lock", mode=0o600, thread_local=False)
        self._thread = threading.Thread(target=self._run, name="device-plugin", daemon=True)

    def start(self) -> None:
        """Begin, and come back at once."""
        self._thread.start()

    def close(self) -> None:
        """Withdraw every pool."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(30.0)
        if self._watched is not None:
            self._watched.close()
        with self._lock:
            plugin, self._plugin = self._plugin, None
        if plugin is not None:
            plugin.close()
        self._only_one.release()

    def states(self) -> "list[State]":
        """How each pool stands with the kubelet; [] while there is none."""
        return self._plugin.states() if self._plugin is not None else []

    def held(self) -> Mapping[str, int]:
        """How many device ids containers hold, by resource."""
        return self._plugin.held() if self._plugin is not None else {}

    def _run(self) -> None:
        directory = self._paths.device_plugins
        if not directory.is_dir():
            _log.info("device plugin: waiting for a kubelet: there is no %s", directory)
        while not directory.is_dir():
            if self._ended.wait(LOOK_EVERY):
                return
        if not self._alone():
            return
        if self._file is None:
            self._take()
        else:
            self._watched = Watched(self._file, self._take, name="pools")

    def _alone(self) -> bool:
        """Wait until no other device plugin writes this node's checkpoint; False at the end."""
        told = ""
        while not self._ended.is_set():
            try:
                self._paths.devices.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._only_one.acquire(timeout=0)
                return True
            except Timeout:
                problem = f"another one is running: it holds {self._only_one.lock_file}"
            except OSError as error:
                problem = f"cannot use {self._paths.devices}: {error.strerror}"
            if problem != told:
                _log.warning("device plugin: %s (waiting)", problem)
            told = problem
            self._ended.wait(LOOK_EVERY)
        return False

    def _take(self) -> None:
        """The configuration as it is now, if it is another one."""
        try:
            config = self._load()
        except ConfigError as error:
            if str(error) != self._wrong:
                before = "what was before it stays" if self._config else "nothing is offered"
                _log.error("%s (%s)", error, before)
            self._wrong = str(error)
            return
        self._wrong = ""
        if config == self._config or self._ended.is_set():
            return
        self._config = config
        offered = ", ".join(f"{pool.resource} ({pool.mode})" for pool in config.pools)
        _log.info("device plugin: pools %s", offered or "none")
        try:
            self._apply(config)
        except Exception:  # noqa: BLE001 - whatever it is, attachments are served all the same
            _log.exception("device plugin: cannot serve the pools")
            self._config = None

    def _apply(self, config: Config) -> None:
        from deviceplugin.manager import DevicePlugin  # it loads gRPC

        with self._lock:
            if self._plugin is not None:
                self._plugin.reconfigure(config)
            elif not self._ended.is_set():
                self._plugin = DevicePlugin(self._paths, config)
                self._plugin.start()
