"""Compares the ledger with the kubelet's own records, and updates the ledger.

The ledger adopts ids that only the kubelet has. The kubelet records a container's device nodes only
by name. After a driver reload, these names may belong to other HCAs.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from msgspec.structs import replace

from base.paths import Paths
from base.problems import Problems
from deviceplugin import checkpoint, current, pod_devices
from deviceplugin.allocate import cdi, device_info, job_config, memlock
from deviceplugin.allocate.container_devices import recorded
from deviceplugin.allocate.device_files import inside
from deviceplugin.checkpoint import AllocatedHCA, AllocatedNode, AllocatedRdmaDevice, Allocation
from deviceplugin.kubelet import records
from deviceplugin.kubelet.pod_resources import PodResourcesClient
from deviceplugin.kubelet.records import KubeletUnreadable, PodDevices
from deviceplugin.kubelet.registration import PluginServer
from deviceplugin.ledger import Ledger
from deviceplugin.pool_service import PoolService
from deviceplugin.pools.pool import Pool
from host.sysfs import pci
from host.sysfs.discovery import HCA

ASK_KUBELET = 2.0  # seconds
_KUBELET = "the kubelet's allocations"

# IB_UVERBS_MAJOR, IB_UVERBS_BASE_MINOR, IB_UVERBS_NUM_FIXED_MINOR (core/uverbs_main.c)
_MAJOR, _FIRST_MINOR, _FIXED = 231, 192, 32

_log = logging.getLogger(__name__)

PodsKnown = Callable[[Collection[tuple[str, str]], Collection[str]], object]
"""Gets (namespace, name) and UIDs of all pods that hold devices, after each comparison."""

AdoptGpus = Callable[[Sequence[PodDevices]], object]
"""Records parts of GPUs that only the kubelet has. Raises OSError."""


class Reconciler:
    """Compares the ledger with the kubelet's records. One thread at a time may use it."""

    def __init__(
        self,
        paths: Paths,
        ledger: Ledger,
        kubelet: PodResourcesClient,
        adopt_gpus: AdoptGpus,
        pods_known: PodsKnown = lambda names, uids: None,
    ) -> None:
        self._adopt_gpus = adopt_gpus
        self._pods_known = pods_known
        self._paths = paths
        self._ledger = ledger
        self._kubelet = kubelet
        self._problems = Problems(_log)

    def reconcile(
        self, services: Mapping[str, PoolService], servers: Mapping[str, PluginServer]
    ) -> bool:
        """Adopt ids that only the kubelet has, and drop ids that the kubelet lacks. Raises OSError.

        Returns True if the ledger has changed. If the kubelet's checkpoint has ids that
        PodResources lacks, the `servers` send their lists again. The kubelet writes its checkpoint
        when it receives a list.
        """
        in_checkpoint, in_pod_resources, problem = self._read_kubelet()
        rows = [*in_checkpoint, *in_pod_resources]
        changed = self._adopt_all(services, rows)
        if rows or problem is None:
            self._adopt_gpus(rows)
        if problem is None:
            changed |= self._forget(rows)
            ours = {
                *list(servers),
                *services,
                *(allocation.resource for allocation in self._ledger.allocations()),
            }
            if any(
                resource in ours for resource, _ in _keys(in_checkpoint) - _keys(in_pod_resources)
            ):
                for server in list(servers.values()):
                    server.changed(again=True)
        return changed

    def adopt_written(self, services: Mapping[str, PoolService]) -> None:
        """Adopt the ids of the kubelet's checkpoint, before pools are offered. Raises OSError."""
        try:
            rows = records.from_checkpoint(self._paths, nodes=True)
            self._adopt_all(services, rows)
            self._adopt_gpus(rows)
        except KubeletUnreadable as error:
            self._problems.tell(_KUBELET, str(error))

    def _adopt_all(self, services: Mapping[str, PoolService], rows: Collection[PodDevices]) -> bool:
        changed = False
        for resource, service in list(services.items()):
            changed |= self._adopt(
                resource, service, [row for row in rows if row.resource == resource]
            )
            self._restore_device_information(service)
        return changed

    def _adopt(self, resource: str, service: PoolService, rows: Iterable[PodDevices]) -> bool:
        held = self._ledger.held(resource)
        hcas: dict[str, tuple[AllocatedHCA, ...]] = {}
        for row in rows:
            allocations = [held[device_id] for device_id in row.ids if device_id in held]
            doubtful = [
                device_id
                for device_id in row.ids
                if device_id not in held or not held[device_id].devices
            ]
            if not agree(allocations, row):
                doubtful = list(row.ids)
            if doubtful:
                devices = behind(self._paths, service.pool, service.hcas, row)
                # Rows of the kubelet's checkpoint come first and win, because they have the nodes.
                hcas = {device_id: devices[device_id] for device_id in doubtful} | hcas
        # An allocation since the boot stays, because the row may be of an earlier pod.
        replaceable = {
            device_id: allocation
            for device_id, allocation in held.items()
            if not allocation.devices
            or allocation.adopted
            or allocation.boot_id != self._ledger.boot_id
        }
        unknown = sorted(
            device_id for device_id in hcas if not hcas[device_id] and device_id not in held
        )
        adopted = {
            device_id: devices
            for device_id, devices in hcas.items()
            if devices
            and (
                device_id not in held
                or (device_id in replaceable and devices != replaceable[device_id].devices)
            )
        }
        if not adopted and not unknown:
            return False
        self._ledger.adopt(resource, adopted | dict.fromkeys(unknown, ()), replaceable)
        if adopted:
            _log.info("%s: adopted from the kubelet: %s", resource, ", ".join(sorted(adopted)))
        if unknown:
            _log.warning(
                "%s: %s: the HCA of the id is unknown: %s",
                resource,
                ", ".join(unknown),
                pod_devices.NOT_TOLD,
            )
        return True

    def _restore_device_information(self, service: PoolService) -> None:
        """Write missing device-information files, because a reboot removes their directory."""
        for device_id, allocation in self._ledger.held(service.name).items():
            file = device_info.path(self._paths, service.name, device_id)
            if len(allocation.devices) == 1 and not file.exists():
                service.restore_device_information(device_id, allocation.devices[0])

    def _forget(self, rows: Collection[PodDevices]) -> bool:
        dropped = self._ledger.drop_unknown(_keys(rows))
        for resource, device_id in dropped:
            _log.info("%s: %s is free again", resource, device_id)
        for what, remove in (
            ("device information", device_info.remove_stale),
            ("NCCL and UCX", job_config.remove_stale),
        ):
            try:
                remove(self._paths, self._ledger.keys)
            except OSError as error:
                _log.warning("cannot remove the files of free ids (%s): %s", what, error)
        pods = {(row.namespace, row.name) for row in rows if row.name}
        self._pods_known(pods, {row.uid for row in rows if row.uid})
        return bool(dropped)

    def _read_kubelet(self) -> tuple[list[PodDevices], list[PodDevices], str | None]:
        """The rows of the kubelet's checkpoint, the rows of PodResources, and any read error."""
        in_checkpoint: list[PodDevices] = []
        in_pod_resources: list[PodDevices] = []
        problems = []
        try:
            in_checkpoint = records.from_checkpoint(self._paths, nodes=True)
        except KubeletUnreadable as error:
            problems.append(str(error))
        try:
            in_pod_resources = records.from_answer(self._kubelet.list(ASK_KUBELET))
        except KubeletUnreadable as error:
            problems.append(str(error))
        problem = "; ".join(problems) or None
        self._problems.tell(_KUBELET, problem)
        return in_checkpoint, in_pod_resources, problem


def behind(
    paths: Paths, pool: Pool, hcas: Sequence[HCA], row: PodDevices
) -> dict[str, tuple[AllocatedHCA, ...]]:
    """The HCAs of each device id in a row, or () if unknown. `hcas` has all HCAs of the node."""
    uverbs = pci.uverbs_numbers(paths)  # by RDMA device
    own = {hca.id: {uverbs[name][0] for name in hca.rdma_names if name in uverbs} for hca in hcas}
    by_id = {device_id: _hcas(pool, hcas, device_id, row, own) for device_id in row.ids}
    held = {hca.id: hca for of_id in by_id.values() for hca in of_id}
    numbers = {name: (major, minor) for name, major, minor in uverbs.values()}
    current_nodes = {node for hca_id in held for node in own.get(hca_id, ())}
    # Nodes of the container that no HCA of the row has now.
    former = [_node(name, numbers) for name in row.nodes if name not in current_nodes]
    devices = {
        hca_id: _with_nodes_of_holder(recorded(pool, hca), row.nodes, former)
        for hca_id, hca in held.items()
    }
    return {
        device_id: _usable(tuple(devices[hca.id] for hca in of_id)) or _by_address(device_id)
        for device_id, of_id in by_id.items()
    }


def agree(allocations: Iterable[Allocation], row: PodDevices) -> bool:
    """Whether allocations match the row's nodes or CDI names. A row with neither matches."""
    devices = [device for allocation in allocations for device in allocation.devices]
    if row.nodes:
        uverbs = {current.uverbs_of(rdma) for device in devices for rdma in device.rdma}
        return {node[0] for node in uverbs if node is not None} == set(row.nodes)
    names = {cdi.qualified(row.resource, device.id) for device in devices}
    given = {name for name in row.cdi if not memlock.is_name(name)}
    return not given or names == given


def _hcas(
    pool: Pool,
    hcas: Sequence[HCA],
    device_id: str,
    row: PodDevices,
    own: Mapping[str, AbstractSet[str]],
) -> Sequence[HCA]:
    """Find the HCAs of an id from the pool, else from the id's text, else from the row's device
    nodes.
    """
    slot = pool.slot(device_id)
    if slot is not None:
        of_slot = [hca for hca in pool.hcas if hca.id in slot.hcas]
        named = [hca for hca in of_slot if cdi.qualified(row.resource, hca.id) in row.cdi]
        return named or of_slot
    hca_id = pod_devices.hca_of(device_id)
    return (
        [hca for hca in hcas if hca.id == hca_id or device_id in hca.rdma_names]
        or [hca for hca in hcas if not own[hca.id].isdisjoint(row.nodes)]
        or (pool.hcas if pool.config.mode == "all" and pci.canonical(hca_id) is None else ())
    )


def _with_nodes_of_holder(
    device: AllocatedHCA, nodes: Collection[str], former: list[AllocatedNode]
) -> AllocatedHCA:
    """Replace each node that `nodes` lacks by the next node of `former`, else by `None`."""

    def own(rdma: AllocatedRdmaDevice) -> AllocatedRdmaDevice:
        uverbs = current.uverbs_of(rdma)
        # A row without nodes: the container got CDI names, or only PodResources has the row.
        if not nodes or uverbs is None or uverbs[0] in nodes:
            return rdma
        return replace(rdma, uverbs=former.pop(0) if former else None)

    return replace(device, rdma=tuple(map(own, device.rdma)))


def _usable(devices: tuple[AllocatedHCA, ...]) -> tuple[AllocatedHCA, ...]:
    """The devices that have a node in the container. If there are none: all devices."""
    with_nodes = tuple(
        device
        for device in devices
        if not device.rdma or any(rdma.uverbs is not None for rdma in device.rdma)
    )
    return with_nodes or devices


def _by_address(device_id: str) -> tuple[AllocatedHCA, ...]:
    """The PCI function that the id names, present or absent; () if the id names none."""
    address = pci.canonical(pod_devices.hca_of(device_id))
    if address is None:
        return ()
    return (AllocatedHCA(id=address, address=address, netdevs=(), rdma=()),)


def _node(name: str, numbers: Mapping[str, tuple[int, int]]) -> AllocatedNode:
    number = int(name.removeprefix("uverbs"))
    fixed = (_MAJOR, _FIRST_MINOR + number) if number < _FIXED else (0, 0)
    return AllocatedNode(inside(name), *numbers.get(name, fixed))


def _keys(rows: Iterable[PodDevices]) -> set[checkpoint.AllocationKey]:
    return {(row.resource, device_id) for row in rows for device_id in row.ids}
