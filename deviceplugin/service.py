"""The device plugin as the agent, or `podfabric device-plugin`, runs it.

It waits for a kubelet's directory to be there: a node without a kubelet pays for nothing, for
gRPC is a third of an agent's memory. A configuration that is wrong is told and does not count.
"""

import gc
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from base import msgspec_warmup
from base.paths import Paths
from base.watching import WatchedFile
from deviceplugin.pools.config import ConfigError, DevicePluginConfig

if TYPE_CHECKING:
    from deviceplugin.kubelet.server import PoolState
    from deviceplugin.plugin import DevicePlugin
    from deviceplugin.reconcile import PodsKnown

LOOK_EVERY = 1.0  # seconds, for a kubelet's directory
TRY_AGAIN = 5.0  # seconds, after the pools could not be served

_log = logging.getLogger(__name__)


class Service:
    """Serves what `load` says, from `start` to `close`; again whenever `file` changes.

    `pods_known` is called with the pods that the kubelet knows, after each comparison with it.
    """

    def __init__(
        self,
        paths: Paths,
        load: Callable[[], DevicePluginConfig],
        file: Path | None,
        pods_known: "PodsKnown" = lambda names, uids: None,
    ) -> None:
        self._pods_known = pods_known
        self._paths = paths
        self._load = load
        self._file = file
        self._wrong = ""
        self._failed = ""
        self._config: DevicePluginConfig | None = None
        self._lock = threading.RLock()
        self._plugin: DevicePlugin | None = None
        self._watched: WatchedFile | None = None
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

    def states(self) -> "list[PoolState]":
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
            self._watched = WatchedFile(self._file, self._take, name="pools")
        while not self._ended.wait(TRY_AGAIN):
            if self._failed:
                self._take()

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
        with self._lock:
            self._take_locked()

    def _take_locked(self) -> None:
        """The configuration as it is now, if it is another one or could not be served."""
        try:
            config = self._load()
        except ConfigError as error:
            if str(error) != self._wrong:
                before = "what was before it stays" if self._config else "nothing is offered"
                _log.error("%s (%s)", error, before)
            self._wrong = str(error)
            return
        self._wrong = ""
        if self._ended.is_set() or (config == self._config and not self._failed):
            return
        self._config = config
        offered = ", ".join(f"{pool.resource} ({pool.mode})" for pool in config.pools)
        _log.info("device plugin: pools %s", offered or "none")
        try:
            self._apply(config)
        except Exception as error:  # noqa: BLE001 - attachments are served all the same
            if str(error) != self._failed:
                _log.exception("device plugin: cannot serve the pools (tried again)")
            self._failed = str(error) or type(error).__name__
        else:
            self._failed = ""

    def _apply(self, config: DevicePluginConfig) -> None:
        from deviceplugin.plugin import DevicePlugin  # it loads gRPC

        msgspec_warmup.build()
        if self._plugin is not None:
            self._plugin.reconfigure(config)
            return
        plugin = DevicePlugin(self._paths, config, self._pods_known)
        try:
            plugin.start()
        except BaseException:
            plugin.close()
            raise
        self._plugin = plugin
        gc.collect()
        gc.freeze()  # gRPC and the pools are here to stay: no Allocate waits for a look at them
