"""What keeps the limits on each GPU that is given in parts, and which GPUs are withheld for it.

The choice is also in a file, for commands that tell people why a GPU is not given.
"""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from base import decoding, files
from base.paths import Paths
from deviceplugin.gpus.parts import GpuParts
from deviceplugin.pools.gpu_pool import GpuBinding, GpuPoolConfig
from gpu import tiers
from gpu.driver_files import SharedFile
from gpu.inventory import NodeGPU
from gpu.settings import GpuLimitSettings
from gpu.tiers import Obstacle, TieredGPU

NO_CDI = "it takes CDI devices, which containers get with `devices: {gpuBinding: start}`"

_log = logging.getLogger(__name__)


class GpuTiers:
    """The choices of the last look, by the GPUs' addresses."""

    def __init__(self, paths: Paths) -> None:
        self._file = path(paths)
        self._written: Mapping[str, TieredGPU] | None = None
        self.chosen: Mapping[str, TieredGPU] = {}

    def take(self, chosen: Mapping[str, TieredGPU]) -> None:
        """Log what has changed, and write it down."""
        for address, of in chosen.items():
            before = self.chosen.get(address)
            if before is None or before.choice != of.choice:
                _tell(of)
        self.chosen = chosen
        if chosen == self._written:
            return
        try:
            if chosen or self._file.exists():
                content = msgspec.json.encode(chosen)
                files.write_atomically(self._file, content, 0o644, durable=False)
            self._written = chosen
        except OSError as error:
            _log.warning("%s: cannot be written: %s", self._file, error.strerror)


def chosen(
    gpu: NodeGPU,
    config: GpuPoolConfig,
    settings: GpuLimitSettings,
    parts: GpuParts,
    binding: GpuBinding,
) -> TieredGPU:
    """What keeps the limits on a GPU of a pool. `binding` is when containers get their GPU."""
    obstacles = dict(parts.obstacles(mounted(config), gpu.gpu.uuid))
    if binding != "start":
        by_cdi = tiers.BY_CDI & obstacles.keys()
        obstacles |= {tier: partial(_first, obstacles[tier], NO_CDI) for tier in by_cdi}
    choice = tiers.choose(obstacles, settings.enforce, settings.require)
    return TieredGPU(uuid=gpu.gpu.uuid, minor=gpu.minor, choice=choice)


def withheld(gpu: NodeGPU, of: TieredGPU) -> NodeGPU:
    """The GPU, with a fault if its limits cannot be kept as they must."""
    if gpu.fault is None and of.choice.unhealthy is not None:
        return replace(gpu, fault=of.choice.unhealthy)
    return gpu


def path(paths: Paths) -> Path:
    """The file with what was chosen last."""
    return paths.run / "gpu-tiers.json"


def written(paths: Paths) -> Mapping[str, TieredGPU]:
    """What the device plugin chose last, by the GPU's address; {} if it has not, or not yet."""
    try:
        return decoding.decode(files.read(str(path(paths))), dict[str, TieredGPU])
    except (OSError, msgspec.MsgspecError):
        return {}


def mounted(config: GpuPoolConfig) -> SharedFile | None:
    """What a pool mounts of the driver."""
    mount = config.driver_mount
    return None if mount is None else SharedFile(mount.host, mount.container)


def _first(obstacle: Obstacle, other: str) -> str:
    return obstacle() or other


def _tell(of: TieredGPU) -> None:
    name, choice = f"nvidia{of.minor}", of.choice
    reasons = "; ".join(f"{tier}: {reason}" for tier, reason in choice.refused.items())
    if choice.unhealthy is not None:
        _log.warning("%s is not given: %s", name, choice.unhealthy)
    elif choice.tier == "none":
        _log.warning("%s: nothing keeps limits: %s", name, reasons or "enforce allows nothing")
    else:
        stronger = f" ({reasons})" if reasons else ""
        _log.info("%s: limits are kept by: %s%s", name, choice.tier, stronger)
