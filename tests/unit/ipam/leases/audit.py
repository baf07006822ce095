"""Invariants of every node and the API server, at any time (docs/developers/protocol.md)."""

from collections import Counter
from collections.abc import Sequence

from ipam.addresses import parse
from ipam.leases.objects import AddressBlock
from ipam.store.block_rows import LeasedBlock
from tests.fake_api import FakeApi
from tests.unit.ipam.leases.nodes import ClusterNode


def rows_of(node: ClusterNode) -> list[LeasedBlock]:
    with node.files.transaction() as tables:
        return list(tables.blocks())


def instance_of(node: ClusterNode) -> str:
    with node.files.transaction() as tables:
        known = tables.instance()
        return known.id if known else ""


def audit(server: FakeApi, nodes: Sequence[ClusterNode]) -> None:
    """Check I1, I3, I4 and I10, which hold after any step, even after a failure."""
    usable = [
        row for node in nodes for row in rows_of(node) if row.is_confirmed(node.boot, node.clock())
    ]
    names = Counter(row.name for row in usable)
    assert all(count == 1 for count in names.values()), f"two nodes may hand out: {names}"
    owners: dict[tuple[str, str], str] = {}
    objects = {each.metadata.name: each for each in server.look_at_all(AddressBlock).items}
    for node in nodes:
        rows = rows_of(node)
        for held in node.store.reservations():
            address = parse(held.address)
            if held.boot != node.boot:
                continue
            key = (held.domain, held.address)
            assert key not in owners, f"{key} is held on {owners[key]} and {node.name}"
            owners[key] = node.name
            inside = [row for row in rows if row.first <= address <= row.last]
            assert inside, f"{held.address} of {node.name} is in no block"
            assert all(row.state != "returning" for row in inside), f"{held.address} is given back"
        for row in rows:
            if row.is_confirmed(node.boot, node.clock()) and row.name not in node.forced:
                found = objects.get(row.name)
                assert found is not None, f"{node.name} uses {row.name}, which is free"
                assert found.metadata.uid == row.uid
                assert found.spec.holder.instance == instance_of(node)


def audit_settled(server: FakeApi, nodes: Sequence[ClusterNode]) -> None:
    """L2: once all is well, the API server and each store know the same blocks."""
    audit(server, nodes)
    for node in nodes:
        selector = {"spec.holder.instance": instance_of(node)}
        leased = {each.metadata.name for each in server.look_at_all(AddressBlock, selector).items}
        assert leased == {row.name for row in rows_of(node)}
        assert {row.state for row in rows_of(node)} <= {"usable"}
