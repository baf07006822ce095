"""Finds the tenant that a process belongs to. A tenant is a container that holds a group."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from base.pod import Pod
from gpu.limits import processes
from gpu.limits.processes import Container, Mount

_MOST_CONTAINERS = 4096  # most containers whose groups are cached
_MOST_ANCESTORS = 32


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """The container that holds a group."""

    group: str
    pod: Pod  # the UID is "" while it is unknown
    container: str  # "" while it is unknown


class Tenants:
    """Finds the tenant of a process. Any thread may use it. `listed` returns all tenants.

    The cgroup of a process identifies the pod. If the pod has several groups, the mounted region
    identifies the group, because a process can mount only the region of its group. A process that
    called chroot(2) does not show its mounts. For such a process, the group comes from the
    container's cached group or from an ancestor's mounts.
    """

    def __init__(self, listed: Callable[[], Sequence[Tenant]], root: Path) -> None:
        self.listed = listed
        self._root = root
        self._lock = threading.Lock()
        self._groups: OrderedDict[Container, str] = OrderedDict()  # cached groups

    def of(self, pid: int) -> Tenant | None:
        """The tenant of the process; `None` if its container holds no group.

        The caller must check that the process has not ended (`processes.has_ended`).
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
        known = next((tenant for tenant in possible if tenant.group == group), None)
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
        """The tenant whose region the process, or an ancestor in its container, has mounted."""
        for _ in range(_MOST_ANCESTORS):
            mounted = processes.mounted_region(pid)
            if mounted is not None:
                regions = ((tenant, self._region(tenant.group)) for tenant in possible)
                return next((tenant for tenant, region in regions if region == mounted), None)
            pid = processes.parent_of(pid) or 0
            if not pid or processes.container_of(pid) != container:
                return None
        return None

    def _region(self, group: str) -> Mount | None:
        """The place of the group's region; `None` if the region is gone."""
        try:
            return processes.place_of(self._root / group / "region")
        except OSError:  # the group is being removed
            return None
