"""Who holds the groups of this node, and which of them a process of the host belongs to."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from base.pod import Pod
from gpu.limits import processes
from gpu.limits.processes import Container, Mount

_MOST_CONTAINERS = 4096  # whose groups are remembered
_MOST_ANCESTORS = 32


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """The holder of a group: a container."""

    group: str
    pod: Pod  # its UID may be "" while it is not known
    container: str  # "" while it is not known


class Tenants:
    """Finds the tenant of a process, among those that `listed` has now. Any thread may use it.

    Nothing that the process says counts: its cgroup tells the pod. Where that leaves several
    groups, the file that is mounted as the region into the process' container tells which; a
    process can put another file there only if it has it. A process that changed its root does not
    show its container's mounts: then its container counts, if any process of it was seen before,
    or its ancestors in the container do.
    """

    def __init__(self, listed: Callable[[], Sequence[Tenant]], root: Path) -> None:
        self.listed = listed
        self._root = root
        self._lock = threading.Lock()
        self._groups: OrderedDict[Container, str] = OrderedDict()  # of containers that were seen

    def of(self, pid: int) -> Tenant | None:
        """The tenant of the process; None if it is in no container that holds a group.

        The caller makes sure that the pid is still that process' (`processes.has_ended`).
        """
        container = processes.container_of(pid)
        if container is None:
            return None
        listed = self.listed()
        own = [tenant for tenant in listed if tenant.pod.uid == container.pod_uid]
        if len(own) == 1:
            return own[0]
        possible = own or [tenant for tenant in listed if not tenant.pod.uid]
        with self._lock:
            group = self._groups.get(container)
        known = next((each for each in possible if each.group == group), None)
        if known is None and possible:
            known = self._by_mount(possible, container, pid)
            if known is not None:
                with self._lock:
                    self._groups[container] = known.group
                    if len(self._groups) > _MOST_CONTAINERS:
                        self._groups.popitem(last=False)
        return known

    def _by_mount(
        self, possible: Sequence[Tenant], container: Container, pid: int
    ) -> Tenant | None:
        """Whose region the process sees, or the nearest of its ancestors that sees one."""
        for _ in range(_MOST_ANCESTORS):
            mounted = processes.mounted_region(pid)
            if mounted is not None:
                regions = ((each, self._region(each.group)) for each in possible)
                return next((each for each, region in regions if region == mounted), None)
            pid = processes.parent_of(pid) or 0
            if not pid or processes.container_of(pid) != container:
                return None
        return None

    def _region(self, group: str) -> Mount | None:
        """Where the group's region is: each has a file system of its own."""
        try:
            return processes.place_of(self._root / group / "region")
        except OSError:  # it is being removed
            return None
