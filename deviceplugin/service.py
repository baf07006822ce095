"""Runs the device plugin, in the agent or as `podfabric device-plugin`.

Only nodes with a kubelet load gRPC. Other nodes save a third of the agent's memory.
"""

import gc
import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from base import decoding, locks
from base.locks import Busy
from base.loop import StepThread
from base.paths import Paths
from base.problems import Problems
from base.watching import WatchedFile
from deviceplugin.pools.pool_config import ConfigError, DevicePluginConfig

if TYPE_CHECKING:
    from deviceplugin.plugin import DevicePlugin
    from deviceplugin.reconcile import PodsKnown
    from gpu.pools.limit_backend import GpuLimits

LOOK_EVERY = 1.0  # seconds between checks for the kubelet's directory
TRY_AGAIN = 5.0  # seconds after the pools could not be served

_log = logging.getLogger(__name__)


class Service(StepThread):
    """Serves the configuration that `load` reads. Calls `load` again when `file` changes.

    If `leaving`, the service serves only containers that already have parts of GPUs. `mistaken`
    gets each mistake in the configuration. `close` closes `gpu_limits`.
    """

    def __init__(
        self,
        paths: Paths,
        load: Callable[[], DevicePluginConfig],
        file: Path | None,
        pods_known: "PodsKnown" = lambda names, uids: None,
        gpu_limits: "GpuLimits | None" = None,
        leaving: bool = False,
        mistaken: Callable[[str], object] = lambda text: None,
    ) -> None:
        super().__init__("device-plugin", join=30.0)
        self.mistake: str | None = None  # why the configuration cannot be used
        self._mistaken = mistaken
        self._leaving = leaving
        self._gpu_limits = gpu_limits
        self._pods_known = pods_known
        self._paths = paths
        self._load = load
        self._file = file
        self._unserved: str | None = None  # why the pools cannot be served
        self._config: DevicePluginConfig | None = None
        self._lock = threading.RLock()
        self.plugin: DevicePlugin | None = None  # set once the kubelet's directory exists
        self._watched: WatchedFile | None = None
        self._problems = Problems(_log)
        self._is_alone = False  # this is the node's only device plugin
        self._held = ExitStack()  # has the lock of the only device plugin

    def prepare(self) -> None:
        """Load gRPC in advance, so that the start is quick."""
        if self._paths.device_plugins.is_dir():
            import deviceplugin.plugin  # noqa: F401 - it loads gRPC

    def start(self) -> None:
        if not self._paths.device_plugins.is_dir():
            directory = self._paths.device_plugins
            _log.info("device plugin: waiting for a kubelet: %s does not exist", directory)
        super().start()

    def close(self) -> None:
        super().close()
        if self._watched is not None:
            self._watched.close()
        with self._lock:
            plugin, self.plugin = self.plugin, None
        if self._gpu_limits is not None:
            self._gpu_limits.close()
        if plugin is not None:
            plugin.close()
        self._held.close()

    def step(self) -> float:
        """Begin to serve once a kubelet exists and no other device plugin runs."""
        if self._is_alone:
            if self._unserved is not None:
                self._load_configuration()
            return TRY_AGAIN
        if not self._paths.device_plugins.is_dir():
            return LOOK_EVERY
        path, pause = self._paths.devices / "plugin.lock", 0.0
        try:
            lock = locks.locked(path, "the device plugin", timeout=LOOK_EVERY, keep=True)
            self._held.enter_context(lock)
        except Busy:
            problem = f"another device plugin runs and has locked {path}: stop it"
        except OSError as error:
            problem, pause = f"cannot use {self._paths.devices}: {error.strerror}", LOOK_EVERY
        else:
            self._is_alone = True
            if self._file is None:
                self._load_configuration()
            else:
                self._watched = WatchedFile(self._file, self._load_configuration, name="pools")
            return TRY_AGAIN
        self._problems.tell("device plugin", f"{problem} (waiting)")
        return pause

    def _load_configuration(self) -> None:
        with self._lock:
            try:
                config = replace(self._load(), leaving=self._leaving)
            except ConfigError as error:
                if str(error) != self.mistake:
                    self.mistake = str(error)
                    kept = "keeping the previous one" if self._config else "nothing is offered"
                    _log.error("%s (%s)", error, kept)
                    self._mistaken(self.mistake)
                return
            self.mistake = None
            if self._ended.is_set() or (config == self._config and self._unserved is None):
                return
            self._config = config
            named = [f"{pool.resource} ({pool.mode})" for pool in config.pools]
            named += [f"{name} ({pool.mode})" for pool in config.gpus for name in pool.resources]
            _log.info("device plugin: pools %s", ", ".join(named) or "none")
            try:
                self._apply(config)
                self._unserved = None
            except Exception as error:  # noqa: BLE001 - the agent must go on serving attachments
                if str(error) != self._unserved:
                    _log.exception("device plugin: cannot serve the pools (trying again)")
                self._unserved = str(error) or type(error).__name__

    def _apply(self, config: DevicePluginConfig) -> None:
        from deviceplugin.plugin import DevicePlugin  # it loads gRPC

        decoding.build_decoders()
        parts = self._gpu_limits.parts(config) if self._gpu_limits is not None else None
        if self.plugin is not None:
            self.plugin.reconfigure(config, parts)
        else:
            plugin = DevicePlugin(self._paths, config, self._pods_known, parts)
            try:
                plugin.start()
            except BaseException:
                plugin.close()
                raise
            self.plugin = plugin
        if self._gpu_limits is not None:
            self._gpu_limits.start()
        gc.collect()
        gc.freeze()  # later collections skip gRPC and the pools, which stay
