"""What a container gets for the device ids that the kubelet gives it: device nodes, variables,
CDI names, and the entries of the checkpoint.

Character devices are looked up now, not when the pool was listed: a driver that was loaded anew
has other numbers.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec

from base.paths import Paths
from deviceplugin import checkpoint
from deviceplugin.allocate import cdi, environment, nodes
from deviceplugin.allocate.nodes import DeviceNode
from deviceplugin.pools.pool import Pool
from host import discovery as inventory
from host.discovery import HCA, CharacterDevice
from host.errors import HostError

Code = Literal["INVALID_ARGUMENT", "FAILED_PRECONDITION"]


class AllocateRefused(Exception):
    """The kubelet's request cannot be granted. `code` is the name of the gRPC status."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code: Code = code


class GrantedNode(msgspec.Struct, frozen=True, kw_only=True):
    """A device node that a container gets."""

    path: str  # in the container: "/dev/infiniband/uverbs0"
    host: str
    permissions: str = "rw"  # not "m": a container need not make nodes


class AllocateResult(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, and what is written down of it."""

    nodes: tuple[GrantedNode, ...] = ()  # by path, each once; none where CDI names stand for them
    envs: dict[str, str] = {}  # sorted
    cdi: tuple[str, ...] = ()  # "podfabric.io/rdma-hca=0000:3b:00.0", sorted
    devices: dict[str, tuple[checkpoint.AllocatedHCA, ...]] = {}  # by device id, sorted
    notes: tuple[str, ...] = ()  # for the log: what it goes without


def allocation(
    paths: Paths,
    pool: Pool,
    ids: Sequence[str],
    healthy: Collection[str],
    *,
    current: Mapping[str, HCA] | None = None,
    fabric_env: bool = True,
) -> AllocateResult:
    """What a container gets that is given these ids of the pool.

    `healthy` are the ids that may be given now; `current` the HCAs as they are now, by id
    (looked up if it is not given). `fabric_env`: this is the node's pool that tells NCCL and UCX
    what to use. With CDI, the pool's specification is written. Raises Refused: INVALID_ARGUMENT
    for an id that the pool has not, FAILED_PRECONDITION for one that cannot be used now.
    """
    wanted = _validated(pool, ids, healthy)
    if not wanted:
        return AllocateResult()
    if current is None:
        current = {hca.id: hca for hca in inventory.hcas(paths)}
    opening = _NodeLookup(paths, pool, current)
    of_id = {id_: opening.hcas(id_) for id_ in wanted}
    opened = opening.opened
    names: tuple[str, ...] = ()
    if pool.config.cdi:
        names = _described(paths, pool, current, opened)
    return AllocateResult(
        nodes=() if pool.config.cdi else _granted(opened),
        envs=environment.environment(
            pool.config, [_given(*opened[known]) for known in sorted(opened)], fabric=fabric_env
        ),
        cdi=names,
        devices={id_: tuple(recorded(pool, hca) for hca in hcas) for id_, hcas in of_id.items()},
        notes=tuple(opening.notes),
    )


def describe(paths: Paths, pool: Pool, current: Mapping[str, HCA]) -> None:
    """Bring the pool's CDI specification up to date, if it is to have one.

    For containers that start again with the names that they were given once. Raises cdi.Unwritten.
    """
    if pool.config.cdi:
        cdi.write(paths, pool.config.resource, _nodes(paths, pool, current, {}))


def recorded(pool: Pool, hca: HCA) -> checkpoint.AllocatedHCA:
    """The checkpoint's entry for an HCA of the pool that a container has."""
    verbs = nodes.gives_uverbs(pool, hca)
    umad, issm = verbs and pool.config.umad, verbs and pool.config.issm
    return checkpoint.AllocatedHCA(
        id=hca.id,
        address=hca.address,
        netdevs=hca.netdevs,
        rdma=tuple(
            checkpoint.AllocatedRdmaDevice(
                name=rdma.name,
                uverbs=_written(rdma.uverbs, verbs),
                ports=tuple(
                    checkpoint.AllocatedPort(
                        number=port.number,
                        link_layer=port.link_layer,
                        guid=port.guid,
                        pkeys=port.pkeys,
                        netdevs=port.netdevs,
                        umad=_written(port.umad, umad),
                        issm=_written(port.issm, issm),
                    )
                    for port in rdma.ports
                ),
            )
            for rdma in hca.rdma
        ),
    )


_Opened = Mapping[str, tuple[HCA, Sequence[DeviceNode]]]  # by HCA id


class _NodeLookup:
    """Looks up the nodes of the HCAs that ids stand for, each HCA's once."""

    def __init__(self, paths: Paths, pool: Pool, current: Mapping[str, HCA]) -> None:
        self.opened: dict[str, tuple[HCA, Sequence[DeviceNode]]] = {}
        self.notes: list[str] = []
        self._paths = paths
        self._pool = pool
        self._current = current
        self._manager: DeviceNode | None = None
        if pool.config.rdma:
            try:
                self._manager = nodes.connection_manager(paths)
            except HostError as error:  # InfiniBand does without
                self.notes.append(f"containers go without rdma_cm: {error}")

    def hcas(self, id_: str) -> tuple[HCA, ...]:
        """The HCAs that the id stands for now and that can be used. Raises Refused if none.

        In mode "all" those that do not work are left out, unless none works.
        """
        pool = self._pool
        slot = pool.slot(id_)
        names = slot.hcas if slot is not None else ()
        present = [self._current[name] for name in names if name in self._current]
        if pool.config.mode == "all":
            present = [hca for hca in present if hca.working] or present
        failures = [why for hca in present if (why := self.open(hca))]
        usable = tuple(hca for hca in present if hca.id in self.opened)
        if not usable:
            gone = f"{', '.join(names) or 'its HCA'} is not on this node now"
            what = f"cannot allocate {id_} of {pool.config.resource}"
            raise AllocateRefused(
                "FAILED_PRECONDITION", f"{what}: {failures[0] if failures else gone}"
            )
        self.notes += [f"left out: {why}" for why in failures]
        return usable

    def open(self, hca: HCA) -> str:
        """Why it cannot be used, "" if it can."""
        if hca.id not in self.opened:
            try:
                found = nodes.of_hca(self._paths, self._pool, hca, self._manager)
            except HostError as error:
                return str(error)
            self.opened[hca.id] = (hca, found)
        return ""


def _validated(pool: Pool, ids: Sequence[str], healthy: Collection[str]) -> list[str]:
    resource = pool.config.resource
    wanted = sorted(set(ids))
    for id_ in wanted:
        if pool.slot(id_) is None:
            raise AllocateRefused(
                "INVALID_ARGUMENT",
                f"cannot allocate {id_} of {resource}: the pool has no such id: "
                "`podfabric devices` shows what it has",
            )
    for id_ in wanted:
        slot = pool.slot(id_)
        if slot is not None and id_ not in healthy:
            raise AllocateRefused(
                "FAILED_PRECONDITION",
                f"cannot allocate {id_} of {resource}: {', '.join(slot.hcas)} is unhealthy: "
                "`podfabric doctor` says why",
            )
    return wanted


def _granted(opened: _Opened) -> tuple[GrantedNode, ...]:
    found = {node.path: node for _, of_one in opened.values() for node in of_one}
    return tuple(GrantedNode(path=path, host=found[path].host) for path in sorted(found))


def _given(hca: HCA, found: Sequence[DeviceNode]) -> environment.ContainerHCA:
    first: dict[str, str] = {}
    vfio: dict[str, str] = {}
    for node in found:
        name = node.path.rpartition("/")[2]
        if node.path.startswith("/dev/vfio/"):
            vfio["mount" if name == "vfio" else "dev-mount"] = node.path
        else:
            first.setdefault(name.rstrip("0123456789"), node.path)
    given = {node.path for node in found}
    rdma = tuple(
        one for one in hca.rdma if one.uverbs is not None and nodes.inside(one.uverbs.name) in given
    )
    return environment.ContainerHCA(hca=hca, rdma=rdma, nodes=first, vfio=vfio)


def _described(
    paths: Paths, pool: Pool, current: Mapping[str, HCA], opened: _Opened
) -> tuple[str, ...]:
    """The CDI names of what was opened; the pool's specification is there when this returns."""
    resource = pool.config.resource
    try:
        cdi.write(paths, resource, _nodes(paths, pool, current, opened))
    except cdi.Unwritten as error:
        raise AllocateRefused(
            "FAILED_PRECONDITION", f"cannot allocate of {resource}: {error}"
        ) from None
    return tuple(cdi.qualified(resource, name) for name in sorted(opened) if opened[name][1])


def _nodes(
    paths: Paths, pool: Pool, current: Mapping[str, HCA], opened: _Opened
) -> dict[str, Sequence[DeviceNode]]:
    """The nodes of every HCA of the pool that can be used, also of those not asked for."""
    others = _NodeLookup(paths, pool, current)
    found = {name: of_one for name, (_, of_one) in opened.items()}
    for listed in pool.hcas:
        if listed.id not in found and not others.open(current.get(listed.id, listed)):
            found[listed.id] = others.opened[listed.id][1]
    return found


def _written(node: CharacterDevice | None, given: bool) -> checkpoint.AllocatedNode | None:
    if node is None or not given:
        return None
    return checkpoint.AllocatedNode(nodes.inside(node.name), node.major, node.minor)
