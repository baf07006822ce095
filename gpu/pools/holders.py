"""Finds the container of each group. A group has the limits of one container.

The ledger has the groups. PodResources has the names of pods, and the kubelet's checkpoint has the
UIDs. Facts that are missing when a container starts come from these records later.
"""

import threading
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress

from msgspec.structs import replace

from base.paths import Paths
from base.pod import Pod
from deviceplugin.checkpoint import Allocation, AllocationKey
from deviceplugin.kubelet import records
from deviceplugin.kubelet.records import KubeletUnreadable, PodDevices
from deviceplugin.ledger import Ledger
from gpu.limits.tenants import Tenant


class Holders:
    """The containers that hold groups. Any thread may use an object."""

    def __init__(self, paths: Paths, ledger: Ledger) -> None:
        self._paths = paths
        self._ledger = ledger
        self._lock = threading.Lock()
        self._known: dict[str, Tenant] = {}  # by group

    def listed(self) -> list[Tenant]:
        """The started containers. A pod's name or UID is "" until the kubelet reports it."""
        with self._lock:
            groups = (group for group, _ in _groups(self._ledger.allocations()))
            return [self._tenant(group) for group in dict.fromkeys(groups)]

    def starts(self, group: str, rows: Sequence[PodDevices]) -> None:
        """Record a container's start.

        The caller must write the container's group into the ledger before the next call.
        """
        row = rows[0]
        pod = Pod(row.namespace, row.name, row.uid)
        tenant = Tenant(group=group, pod=pod, container=row.container)
        keys = {(row.resource, device_id) for row in rows for device_id in row.ids}
        with suppress(KubeletUnreadable):  # `learn` completes the tenant later
            if not row.uid:
                tenant = _completed(tenant, keys, records.from_checkpoint(self._paths))
        live = {held for held, _ in _groups(self._ledger.allocations())}
        with self._lock:
            self._known = {held: of for held, of in self._known.items() if held in live}
            self._known[group] = tenant

    def learn(self, rows: Collection[PodDevices]) -> None:
        """Complete the tenants from the kubelet's records."""
        with self._lock:
            for group, key in _groups(self._ledger.allocations()):
                self._known[group] = _completed(self._tenant(group), {key}, rows)

    def _tenant(self, group: str) -> Tenant:
        return self._known.get(group) or Tenant(group=group, pod=Pod(), container="")


def _groups(allocations: Iterable[Allocation]) -> Iterable[tuple[str, AllocationKey]]:
    """The groups of started containers, each with the key of its allocation."""
    for entry in allocations:
        if entry.gpu is not None and entry.gpu.group and entry.gpu.slot == entry.id:
            yield entry.gpu.group, entry.key


def _completed(
    tenant: Tenant, keys: Collection[AllocationKey], rows: Iterable[PodDevices]
) -> Tenant:
    """Complete names and UID from the rows that have ids in `keys`, unless rows disagree."""
    if tenant.pod.name and tenant.pod.uid:
        return tenant
    of_keys = [
        row
        for row in rows
        if any((row.resource, device_id) in keys for device_id in row.ids)
        and tenant.container in ("", row.container)
        and tenant.pod.uid in ("", row.uid or tenant.pod.uid)
    ]
    # A later container may get an init container's ids. Only the checkpoint lists both.
    container = tenant.container
    for row in sorted(of_keys, key=lambda row: (bool(row.name), len(row.ids))):
        container = tenant.container or row.container
    own = [row for row in of_keys if row.container == container]
    names = {(row.namespace, row.name) for row in own if row.name}
    uids = {row.uid for row in own if row.uid}
    pod = tenant.pod
    if not pod.name and len(names) == 1:
        ((namespace, name),) = names
        pod = Pod(namespace, name, pod.uid)
    if not pod.uid and len(uids) == 1:
        pod = Pod(pod.namespace, pod.name, uids.pop())
    return replace(tenant, pod=pod, container=container)
