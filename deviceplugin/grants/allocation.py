"""What a container gets for the device ids that the kubelet gives it: device nodes, variables,
CDI names, and the entries of the checkpoint.

Character devices are looked up now, not when the pool was listed: a driver that was loaded anew
has other numbers.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec

from deviceplugin import checkpoint
from deviceplugin.grants import cdi, environment, nodes
from deviceplugin.grants.nodes import DeviceNode
from deviceplugin.pools.pool import Pool
from host import adapters as inventory
from host.adapters import Adapter, Node
from host.errors import HostError
from host.paths import Paths

Code = Literal["INVALID_ARGUMENT", "FAILED_PRECONDITION"]


class Refused(Exception):
    """The kubelet's request cannot be granted. `code` is the name of the gRPC status."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code: Code = code


class GrantedNode(msgspec.Struct, frozen=True, kw_only=True):
    """A device node that a container gets."""

    path: str  # in the container: "/dev/infiniband/uverbs0"
    host: str
    permissions: str = "rw"  # not "m": a container need not make nodes


class Granted(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, and what is written down of it."""

    nodes: tuple[GrantedNode, ...] = ()  # by path, each once; none where CDI names stand for them
    envs: dict[str, str] = {}  # sorted
    cdi: tuple[str, ...] = ()  # "podfabric.io/rdma-hca=0000:3b:00.0", sorted
    devices: dict[str, tuple[checkpoint.Device, ...]] = {}  # by device id, sorted
    notes: tuple[str, ...] = ()  # for the log: what it goes without


def allocation(
    paths: Paths,
    pool: Pool,
    ids: Sequence[str],
    healthy: Collection[str],
    *,
    current: Mapping[str, Adapter] | None = None,
    fabric_env: bool = True,
) -> Granted:
    """What a container gets that is given these ids of the pool.

    `healthy` are the ids that may be given now; `current` the adapters as they are now, by id
    (looked up if it is not given). `fabric_env`: this is the node's pool that tells NCCL and UCX
    what to use. With CDI, the pool's specification is written. Raises Refused: INVALID_ARGUMENT
    for an id that the pool has not, FAILED_PRECONDITION for one that cannot be used now.
    """
    wanted = _validated(pool, ids, healthy)
    if not wanted:
        return Granted()
    if current is None:
        current = {adapter.id: adapter for adapter in inventory.adapters(paths)}
    opening = _Opening(paths, pool, current)
    of_id = {id_: opening.adapters(id_) for id_ in wanted}
    opened = opening.opened
    names: tuple[str, ...] = ()
    if pool.config.cdi:
        names = _described(paths, pool, current, opened)
    return Granted(
        nodes=() if pool.config.cdi else _granted(opened),
        envs=environment.environment(
            pool.config, [_given(*opened[known]) for known in sorted(opened)], fabric=fabric_env
        ),
        cdi=names,
        devices={
            id_: tuple(recorded(pool, adapter) for adapter in adapters)
            for id_, adapters in of_id.items()
        },
        notes=tuple(opening.notes),
    )


def describe(paths: Paths, pool: Pool, current: Mapping[str, Adapter]) -> None:
    """Bring the pool's CDI specification up to date, if it is to have one.

    For containers that start again with the names that they were given once. Raises cdi.Unwritten.
    """
    if pool.config.cdi:
        cdi.write(paths, pool.config.resource, _nodes(paths, pool, current, {}))


def recorded(pool: Pool, adapter: Adapter) -> checkpoint.Device:
    """The checkpoint's entry for an adapter of the pool that a container has."""
    verbs = nodes.gives_verbs(pool, adapter)
    umad, issm = verbs and pool.config.umad, verbs and pool.config.issm
    return checkpoint.Device(
        id=adapter.id,
        address=adapter.address,
        netdevs=adapter.netdevs,
        rdma=tuple(
            checkpoint.Rdma(
                name=rdma.name,
                uverbs=_written(rdma.uverbs, verbs),
                ports=tuple(
                    checkpoint.Port(
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
            for rdma in adapter.rdma
        ),
    )


_Opened = Mapping[str, tuple[Adapter, Sequence[DeviceNode]]]  # by adapter id


class _Opening:
    """Looks up the nodes of the adapters that ids stand for, each adapter's once."""

    def __init__(self, paths: Paths, pool: Pool, current: Mapping[str, Adapter]) -> None:
        self.opened: dict[str, tuple[Adapter, Sequence[DeviceNode]]] = {}
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

    def adapters(self, id_: str) -> tuple[Adapter, ...]:
        """The adapters that the id stands for now and that can be used. Raises Refused if none.

        In mode "all" those that do not work are left out, unless none works.
        """
        pool = self._pool
        slot = pool.slot(id_)
        names = slot.adapters if slot is not None else ()
        present = [self._current[name] for name in names if name in self._current]
        if pool.config.mode == "all":
            present = [adapter for adapter in present if adapter.working] or present
        failures = [why for adapter in present if (why := self.open(adapter))]
        usable = tuple(adapter for adapter in present if adapter.id in self.opened)
        if not usable:
            gone = f"{', '.join(names) or 'its HCA'} is not on this node now"
            what = f"cannot allocate {id_} of {pool.config.resource}"
            raise Refused("FAILED_PRECONDITION", f"{what}: {failures[0] if failures else gone}")
        self.notes += [f"left out: {why}" for why in failures]
        return usable

    def open(self, adapter: Adapter) -> str:
        """Why it cannot be used, "" if it can."""
        if adapter.id not in self.opened:
            try:
                found = nodes.of_adapter(self._paths, self._pool, adapter, self._manager)
            except HostError as error:
                return str(error)
            self.opened[adapter.id] = (adapter, found)
        return ""


def _validated(pool: Pool, ids: Sequence[str], healthy: Collection[str]) -> list[str]:
    resource = pool.config.resource
    wanted = sorted(set(ids))
    for id_ in wanted:
        if pool.slot(id_) is None:
            raise Refused(
                "INVALID_ARGUMENT",
                f"cannot allocate {id_} of {resource}: the pool has no such id: "
                "`podfabric devices` shows what it has",
            )
    for id_ in wanted:
        slot = pool.slot(id_)
        if slot is not None and id_ not in healthy:
            raise Refused(
                "FAILED_PRECONDITION",
                f"cannot allocate {id_} of {resource}: {', '.join(slot.adapters)} is unhealthy: "
                "`podfabric doctor` says why",
            )
    return wanted


def _granted(opened: _Opened) -> tuple[GrantedNode, ...]:
    found = {node.path: node for _, of_one in opened.values() for node in of_one}
    return tuple(GrantedNode(path=path, host=found[path].host) for path in sorted(found))


def _given(adapter: Adapter, found: Sequence[DeviceNode]) -> environment.Given:
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
        one
        for one in adapter.rdma
        if one.uverbs is not None and nodes.inside(one.uverbs.name) in given
    )
    return environment.Given(adapter=adapter, rdma=rdma, nodes=first, vfio=vfio)


def _described(
    paths: Paths, pool: Pool, current: Mapping[str, Adapter], opened: _Opened
) -> tuple[str, ...]:
    """The CDI names of what was opened; the pool's specification is there when this returns."""
    resource = pool.config.resource
    try:
        cdi.write(paths, resource, _nodes(paths, pool, current, opened))
    except cdi.Unwritten as error:
        raise Refused("FAILED_PRECONDITION", f"cannot allocate of {resource}: {error}") from None
    return tuple(cdi.qualified(resource, name) for name in sorted(opened) if opened[name][1])


def _nodes(
    paths: Paths, pool: Pool, current: Mapping[str, Adapter], opened: _Opened
) -> dict[str, Sequence[DeviceNode]]:
    """The nodes of every adapter of the pool that can be used, also of those not asked for."""
    others = _Opening(paths, pool, current)
    found = {name: of_one for name, (_, of_one) in opened.items()}
    for listed in pool.adapters:
        if listed.id not in found and not others.open(current.get(listed.id, listed)):
            found[listed.id] = others.opened[listed.id][1]
    return found


def _written(node: Node | None, given: bool) -> checkpoint.Node | None:
    if node is None or not given:
        return None
    return checkpoint.Node(nodes.inside(node.name), node.major, node.minor)
