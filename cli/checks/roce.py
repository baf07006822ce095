"""RoCE ports: how many pods their GID tables are enough for."""

from collections import Counter
from collections.abc import Iterator

from cli.checks import Outcome, not_applicable, ok, warning
from cli.this_node import ThisNode
from host import sysfs

_PER_ADDRESS = 2  # GIDs: RoCE v1's and v2's (drivers/infiniband/core/roce_gid_mgmt.c)
_OWN = 2  # of the port's own interface
_RNIC = "4"  # node_type of iWARP, whose ports say Ethernet, too, and which goes without GIDs


def gid_tables(node: ThisNode) -> Iterator[Outcome]:
    """Whether each holder of a RoCE HCA that several may hold can have a GID of its port.

    An address of a pod takes two, if it is of an interface on that port, and without one the
    pod's verbs cannot connect. The table is the HCA's: 128 or 256 GIDs of most.
    """
    holders: Counter[str] = Counter()
    resources: dict[str, list[str]] = {}
    for pool in node.pools:
        if pool.config.mode != "exclusive" and pool.config.rdma:
            holders.update(hca_id for slot in pool.slots for hca_id in slot.hcas)
            for hca in pool.hcas:
                resources.setdefault(hca.id, []).append(pool.config.resource)
    short: dict[tuple[str, int, int], list[str]] = {}
    enough = 0
    for hca_id, where, size in _tables(node):
        if not holders[hca_id] or size < _OWN + _PER_ADDRESS:
            continue
        if holders[hca_id] <= (size - _OWN) // _PER_ADDRESS:
            enough += 1
            continue
        key = ", ".join(resources[hca_id]), holders[hca_id], size
        short.setdefault(key, []).append(where)
    for (names, count, size), ports in sorted(short.items()):
        most = (size - _OWN) // _PER_ADDRESS
        yield warning(
            f"{_some(ports)}: {size} GIDs are enough for {most} pods with an address each, and "
            f"{names} may give the HCA to {count}",
            f"give the pool `slots` (mode all: `amount`) of {most} at most: see docs/pools.md",
        )
    if enough:
        yield ok(
            f"{enough} RoCE ports have GIDs for all whom their pools admit; a pod has one only "
            "with an interface on that port (macvlan, ipvlan, VLAN)"
        )
    if not enough and not short:
        yield not_applicable("no RoCE port is offered to several containers, or tells its table")


def _tables(node: ThisNode) -> Iterator[tuple[str, str, int]]:
    """Of each RoCE port the HCA's id, what to call it, and how many GIDs it has room for."""
    for hca in node.hcas:
        for rdma in hca.rdma:
            device = f"{node.paths.sys}/class/infiniband/{rdma.name}"
            if sysfs.text(f"{device}/node_type").startswith(_RNIC):
                continue
            for port in rdma.ports:
                if port.link_layer == "Ethernet":
                    size = len(sysfs.names(f"{device}/ports/{port.number}/gids"))
                    yield hca.id, f"port {port.number} of {rdma.name}", size


def _some(ports: list[str]) -> str:
    return f"{', '.join(ports[:4])}{f' and {len(ports) - 4} more' if len(ports) > 4 else ''}"
