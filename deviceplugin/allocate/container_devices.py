"""Makes the answer for a container's device ids: device nodes, variables, and CDI names.

Each allocation looks up the device nodes again, because a driver reload changes their numbers.
"""

from collections.abc import Collection, Mapping, Sequence

import grpc
import msgspec

from base.paths import Paths
from deviceplugin import checkpoint, rails
from deviceplugin.allocate import cdi, device_files, environment, job_config, memlock
from deviceplugin.api.v1beta1_pb2 import CDIDevice, ContainerAllocateResponse, DeviceSpec, Mount
from deviceplugin.kubelet.plugin_server import Rejected
from deviceplugin.pools.pool import Pool
from deviceplugin.pools.pool_config import PoolConfig
from host.device_nodes import DeviceNode
from host.errors import HostError
from host.sysfs.discovery import HCA, CharacterDevice


class AllocateResult(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to the kubelet, and its record for the checkpoint."""

    answer: ContainerAllocateResponse
    devices: dict[str, tuple[checkpoint.AllocatedHCA, ...]] = {}  # by device id, sorted
    notes: tuple[str, ...] = ()  # for the log: HCAs and nodes that the container does not get


def allocation(
    paths: Paths,
    pool: Pool,
    ids: Sequence[str],
    healthy: Collection[str],
    current: Mapping[str, HCA],
    *,
    fabric_env: bool = True,
) -> AllocateResult:
    """The allocation of these ids of the pool. Writes the files that the answer names.

    `healthy` are the ids that may be allocated now. `current` has the present HCAs by id.
    `fabric_env` adds the variables and the files of NCCL and UCX. Raises Rejected with
    INVALID_ARGUMENT if the pool lacks an id, and with FAILED_PRECONDITION if an id cannot be used
    now.
    """
    requested = _validated(pool, ids, healthy)
    if not requested:
        return AllocateResult(answer=ContainerAllocateResponse())
    lookup = _NodeLookup(paths, pool, current)
    by_id = {device_id: lookup.hcas(device_id) for device_id in requested}
    nodes_of = lookup.nodes_of
    answer = ContainerAllocateResponse(envs=environment.environment(pool.config, nodes_of))
    resource = pool.config.resource
    try:
        limit = memlock.device(paths, pool.config)
        if pool.config.cdi:
            describe(paths, pool, current)
    except cdi.Unwritten as error:
        raise Rejected(
            grpc.StatusCode.FAILED_PRECONDITION, f"cannot allocate from {resource}: {error}"
        ) from None
    if fabric_env and (hcas := environment.of_libraries(pool.config, nodes_of)):
        _add_job_config(answer, paths, pool.config, requested, hcas)
    if pool.config.cdi:
        answer.cdi_devices.extend(
            CDIDevice(name=cdi.qualified(resource, hca_id))
            for hca_id in sorted(nodes_of)
            if nodes_of[hca_id][1]
        )
    else:
        hosts = {node.path: node.host for _, of_hca in nodes_of.values() for node in of_hca}
        answer.devices.extend(
            DeviceSpec(container_path=path, host_path=hosts[path], permissions="rw")
            for path in sorted(hosts)
        )
    if limit is not None:
        answer.cdi_devices.append(CDIDevice(name=limit))
    devices = {device: tuple(recorded(pool, hca) for hca in of) for device, of in by_id.items()}
    return AllocateResult(answer=answer, devices=devices, notes=tuple(lookup.notes))


def _add_job_config(
    answer: ContainerAllocateResponse,
    paths: Paths,
    pool: PoolConfig,
    ids: Sequence[str],
    hcas: Mapping[str, str],
) -> None:
    """Write the container's files of NCCL and UCX, and add them to the answer. Raises Rejected."""
    try:
        place = job_config.make(paths, pool.resource, ids, hcas, pool.traffic_class)
    except OSError as error:
        raise Rejected(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"cannot allocate from {pool.resource}: cannot write {error.filename}: "
            f"{error.strerror}: check the disk and its free space",
        ) from None
    answer.envs.update({**hcas, **job_config.ENVIRONMENT})
    answer.mounts.append(
        Mount(container_path=job_config.INSIDE, host_path=str(place), read_only=True)
    )


def describe(paths: Paths, pool: Pool, current: Mapping[str, HCA]) -> None:
    """Write a pool's CDI specification with the nodes of all usable HCAs. Raises cdi.Unwritten."""
    lookup = _NodeLookup(paths, pool, current)
    for listed in pool.hcas:
        lookup.look_up(current.get(listed.id, listed))
    nodes_by_hca = {hca_id: found for hca_id, (_, found) in lookup.nodes_of.items()}
    cdi.write(paths, pool.config.resource, nodes_by_hca)


def recorded(pool: Pool, hca: HCA) -> checkpoint.AllocatedHCA:
    verbs = device_files.gives_uverbs(pool, hca)
    umad, issm = verbs and pool.config.umad, verbs and pool.config.issm
    return checkpoint.AllocatedHCA(
        id=hca.id,
        address=hca.address,
        netdevs=hca.netdevs,
        rail=rails.number(pool.config.rails, hca),
        rdma=tuple(
            checkpoint.AllocatedRdmaDevice(
                name=rdma.name,
                uverbs=_recorded_node(rdma.uverbs, verbs),
                ports=tuple(
                    checkpoint.AllocatedPort(
                        number=port.number,
                        link_layer=port.link_layer,
                        guid=port.guid,
                        pkeys=port.pkeys,
                        netdevs=port.netdevs,
                        umad=_recorded_node(port.umad, umad),
                        issm=_recorded_node(port.issm, issm),
                    )
                    for port in rdma.ports
                ),
            )
            for rdma in hca.rdma
        ),
    )


class _NodeLookup:
    def __init__(self, paths: Paths, pool: Pool, current: Mapping[str, HCA]) -> None:
        self.nodes_of: dict[str, tuple[HCA, Sequence[DeviceNode]]] = {}
        self.notes: list[str] = []
        self._paths = paths
        self._pool = pool
        self._current = current
        self._manager: DeviceNode | None = None
        if pool.config.rdma:
            try:
                self._manager = device_files.connection_manager(paths)
            except HostError as error:  # InfiniBand works without rdma_cm
                self.notes.append(f"containers do not get rdma_cm: {error}")

    def hcas(self, device_id: str) -> tuple[HCA, ...]:
        """The usable HCAs that the id stands for. Raises Rejected if there are none."""
        pool = self._pool
        slot = pool.slot(device_id)
        hca_ids = slot.hcas if slot is not None else ()
        present = [self._current[hca_id] for hca_id in hca_ids if hca_id in self._current]
        if pool.config.mode == "all":
            present = [hca for hca in present if hca.working] or present
        failures = [why for hca in present if (why := self.look_up(hca)) is not None]
        usable = tuple(hca for hca in present if hca.id in self.nodes_of)
        if not usable:
            gone = f"{', '.join(hca_ids) or 'its HCA'} is not on this node now"
            what = f"cannot allocate {device_id} of {pool.config.resource}"
            raise Rejected(
                grpc.StatusCode.FAILED_PRECONDITION, f"{what}: {failures[0] if failures else gone}"
            )
        self.notes += [f"left out: {why}" for why in failures]
        return usable

    def look_up(self, hca: HCA) -> str | None:
        """Look up an HCA's nodes. Returns the reason if the HCA cannot be used, else `None`."""
        if hca.id not in self.nodes_of:
            try:
                hca_nodes = device_files.of_hca(self._paths, self._pool, hca, self._manager)
            except HostError as error:
                return str(error)
            self.nodes_of[hca.id] = (hca, hca_nodes)
        return None


def _validated(pool: Pool, ids: Sequence[str], healthy: Collection[str]) -> list[str]:
    resource = pool.config.resource
    requested = sorted(set(ids))
    for device_id in requested:
        if pool.slot(device_id) is None:
            raise Rejected(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"cannot allocate {device_id} of {resource}: the pool has no such id: "
                "run `podfabric devices` for its ids",
            )
    for device_id in requested:
        slot = pool.slot(device_id)
        if slot is not None and device_id not in healthy:
            raise Rejected(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"cannot allocate {device_id} of {resource}: this id has no healthy HCA "
                f"({', '.join(slot.hcas)}): run `podfabric doctor` for the reason",
            )
    return requested


def _recorded_node(node: CharacterDevice | None, given: bool) -> checkpoint.AllocatedNode | None:
    if node is None or not given:
        return None
    return checkpoint.AllocatedNode(device_files.inside(node.name), node.major, node.minor)
