"""Check of RoCE ports: for how many pods their GID tables are large enough."""

from collections import Counter
from collections.abc import Iterator

from cli.checks import Outcome, not_applicable, ok, some, warning
from cli.this_node import ThisNode
from host import sysfs

_PER_ADDRESS = 2  # GIDs: RoCE v1's and v2's (drivers/infiniband/core/roce_gid_mgmt.c)
_OWN = 2  # for the port's own interface
_RNIC = "4"  # node_type of iWARP: its ports are Ethernet, too, and it needs no GIDs


def gid_tables(node: ThisNode) -> Iterator[Outcome]:
    """Whether the port of a shared RoCE HCA has GIDs for all containers that may get the HCA.

    Each address of a pod's interface on that port takes two GIDs, and without a GID the pod's
    RDMA devices cannot connect. Most HCAs have tables of 128 or 256 GIDs.
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
            f"{some(ports)}: {size} GIDs are enough for {most} pods with an address each, but "
            f"{names} may give the HCA to {count}",
            f"set the pool's `slots` (mode all: `amount`) to at most {most}: see docs/pools.md",
        )
    if enough:
        yield ok(
            f"{enough} RoCE ports have GIDs for all containers of their pools; a pod has one only "
            "with an interface on that port (macvlan, ipvlan, VLAN)"
        )
    if not enough and not short:
        yield not_applicable("no RoCE port with a known GID table is offered to several containers")


def _tables(node: ThisNode) -> Iterator[tuple[str, str, int]]:
    """The HCA's id, the name and the size of the GID table of each RoCE port."""
    for hca in node.hcas:
        for rdma in hca.rdma:
            device = f"{node.paths.sys}/class/infiniband/{rdma.name}"
            if sysfs.text(f"{device}/node_type").startswith(_RNIC):
                continue
            for port in rdma.ports:
                if port.link_layer == "Ethernet":
                    size = len(sysfs.names(f"{device}/ports/{port.number}/gids"))
                    yield hca.id, f"port {port.number} of {rdma.name}", size
