"""The tiers on this node: why each cannot be had on a GPU, and what each adds to a container.

The tiers `kernel` and `mps` have the shim, too. With `kernel` the driver keeps the limit of memory,
and the shim shares of time and what programs see. With `mps` MPS keeps a part of the GPU's
multiprocessors in place of shares of time, and the shim the limit of memory for all processes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from base.paths import Paths
from gpu import kernel_tier, limit_hook
from gpu.container_edits import ContainerEdits
from gpu.driver_files import SharedFile
from gpu.group_limits import Limit
from gpu.groups import Groups
from gpu.limit_hook import LimitHook
from gpu.mps_tier import MpsTier
from gpu.nvml import Nvml
from gpu.settings import GpuLimitSettings
from gpu.shim_tier import ShimTier
from gpu.tiers import Obstacle, Tier


class NodeTiers:
    """The tiers of a node.

    Args:
        paths: the node's files.
        settings: how limits are enforced.
        groups: whose limits they are.
        driver: answers NVML; None while the driver cannot be asked.
        problem: why it cannot be asked; "" if it can.
    """

    def __init__(
        self,
        paths: Paths,
        settings: GpuLimitSettings,
        groups: Groups,
        driver: Callable[[], Nvml | None],
        problem: Callable[[], str],
    ) -> None:
        self._paths = paths
        self._problem = problem
        self._cgroups = paths.sys / "fs/cgroup"
        self._shim = ShimTier(paths, settings, groups.obstacle)
        self._mps = MpsTier(paths, settings.mps)
        self._unsupported: dict[str, str | None] = {}  # why no limits of cgroups, by UUID
        self._hook = LimitHook(paths.gpu_limit_socket, groups, driver, self._cgroups)
        self._deaf: str | None = f"{paths.gpu_limit_socket} is not served yet"

    def start(self) -> None:
        """Serve the hook that limits containers which start."""
        path = self._paths.gpu_limit_socket
        try:
            self._hook.start()
            self._deaf = None
        except OSError as error:
            self._deaf = f"cannot listen at {path}: {error.strerror or error}"

    def close(self) -> None:
        """Stop. Until the next agent, no container of the tier `kernel` starts."""
        self._hook.close()

    def learn(self, driver: Nvml, uuid: str) -> None:
        """Ask what does not change while the driver is loaded. Raises NvmlError."""
        self._unsupported[uuid] = kernel_tier.unsupported(driver, uuid, self._cgroups)

    def look(self, driver: Nvml, uuids: Iterable[str]) -> None:
        """Ask what may change at any time."""
        for uuid in uuids:
            self._mps.learn(driver, uuid)

    def backend(self, tier: Tier) -> str:
        """What counts memory in the driver for a tier; "none" where nothing does."""
        return kernel_tier.node_backend(self._cgroups) if tier == "kernel" else "none"

    def obstacles(self, mount: SharedFile | None, uuid: str) -> Mapping[Tier, Obstacle]:
        """Why a GPU cannot have each tier, in a pool with this mount of the driver."""
        return {
            "kernel": lambda: self._kernel_obstacle(mount, uuid),
            "mps": lambda: self._mps.obstacle(uuid) or self._shim.obstacle(mount),
            "shim": lambda: self._shim.obstacle(mount),
        }

    def files(self, mount: SharedFile | None) -> Sequence[SharedFile]:
        """What a container with limits sees of the driver and the shims. Raises HostError."""
        return self._shim.files(mount)

    def edits(self, tier: str, group: str, limit: Limit) -> ContainerEdits:
        """What a container that starts gets by its CDI device, beside `files`.

        Raises HostError if the tier cannot keep the limit now: the container must not start.
        """
        if tier == "mps":
            return self._mps.edits(limit)
        if tier != "kernel":
            return ContainerEdits()
        hook = limit_hook.hook(self._paths.gpu_limit, self._paths.gpu_limit_socket, group)
        return ContainerEdits(hooks=(hook,))

    def _kernel_obstacle(self, mount: SharedFile | None, uuid: str) -> str | None:
        unknown = self._problem() or "not looked at yet"
        return (
            self._unsupported.get(uuid, unknown)
            or kernel_tier.dmem_obstacle(self._cgroups)
            or self._deaf
            or self._without_hook()
            or self._shim.obstacle(mount)
        )

    def _without_hook(self) -> str | None:
        if self._paths.gpu_limit.is_file():
            return None
        return f"{self._paths.gpu_limit} is not there: run `podfabric install --gpu` on this node"
