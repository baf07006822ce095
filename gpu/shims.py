"""The libraries that keep limits: whether a node has all they need, and what containers see."""

import time
from collections.abc import Callable, Sequence

from base.paths import Paths
from gpu import driver_files, processes
from gpu.driver_files import SharedFile
from gpu.settings import GpuLimitSettings
from host.errors import HostError

LOOK_AGAIN = 5.0  # seconds; directories with the driver may have thousands of entries


class Shims:
    """The shims on this node. One thread at a time may use it.

    `room` answers why groups of limits cannot be made; None if they can.
    """

    def __init__(
        self, paths: Paths, settings: GpuLimitSettings, room: Callable[[], str | None]
    ) -> None:
        self._shims = paths.shims
        self._root = settings.driver_root
        self._seen = paths.host / settings.driver_root.relative_to("/")
        self._room = room
        self._told: dict[SharedFile | None, tuple[float, str | None]] = {}

    def obstacle(self, mount: SharedFile | None) -> str | None:
        """Why containers of a pool with this mount of the driver cannot be limited."""
        now = time.monotonic()
        at, told = self._told.get(mount, (float("-inf"), None))
        if now - at >= LOOK_AGAIN:
            told = self._obstacle(mount)
            self._told[mount] = now, told
        return told

    def files(self, mount: SharedFile | None) -> Sequence[SharedFile]:
        """What such a container sees of the driver and the shims, beside the mount.

        Raises HostError.
        """
        installed = driver_files.installed(self._seen)
        return driver_files.shared(installed, self._root, self._shims, mount)

    def _obstacle(self, mount: SharedFile | None) -> str | None:
        if not processes.sees_the_host():
            return (
                "the agent does not see the host's processes: run it in the host's pid namespace "
                "(hostPID)"
            )
        try:
            self.files(mount)
        except HostError as error:
            return str(error)
        return self._room()
