"""Checks whether this node can enforce limits, and lists the files for containers."""

import time
from collections.abc import Callable, Sequence

from base.paths import Paths
from gpu.driver import driver_files
from gpu.driver.driver_files import SharedFile
from gpu.gpu_pool import GpuLimitSettings
from gpu.limits import processes
from host.errors import HostError

LOOK_AGAIN = 5.0  # seconds between checks, which may read thousands of directory entries


class Shims:
    """The libraries of gpu/shim on this node. One thread at a time may use an object."""

    def __init__(
        self, paths: Paths, settings: GpuLimitSettings, groups_obstacle: Callable[[], str | None]
    ) -> None:
        self._shims = paths.shims
        self._root = settings.driver_root
        self._seen = paths.host / settings.driver_root.relative_to("/")
        self._groups_obstacle = groups_obstacle
        self._looked = float("-inf")
        self._problem: str | None = None

    def obstacle(self) -> str | None:
        """The reason why the node cannot enforce limits; `None` if there is none."""
        now = time.monotonic()
        if now - self._looked >= LOOK_AGAIN:
            self._looked, self._problem = now, self._obstacle()
        return self._problem

    def files(self) -> Sequence[SharedFile]:
        """The files of the driver and of gpu/shim that a container gets. Raises HostError."""
        return driver_files.shared(driver_files.installed(self._seen), self._root, self._shims)

    def _obstacle(self) -> str | None:
        if not processes.sees_the_host():
            return (
                "the agent does not see the host's processes: run it in the host's pid namespace "
                "(hostPID)"
            )
        try:
            self.files()
        except HostError as error:
            return str(error)
        return self._groups_obstacle()
