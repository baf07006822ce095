"""A node leases an address that another one cedes: real tokens, policies and objects."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam.cluster.ceding import REVIEW_EVERY
from ipam.cluster.kubernetes_api import KubernetesApi
from ipam.cluster.names import pool_name
from ipam.cluster.objects import (
    AddressBlock,
    AddressPool,
    AddressRequest,
    Condition,
    Meta,
    PoolSpec,
    PoolStatus,
    RequestStatus,
)
from tests.api.server import ApiServer, name
from tests.api.test_nodes import RealNode

RANGE = "10.78.0.0/29"
IPAM: dict[str, object] = {"range": RANGE, "network_name": "cedes"}
POOL = pool_name("cedes", RANGE)


def blocks(server: ApiServer) -> list[AddressBlock]:
    return list(server.admin.list(AddressBlock, {"spec.pool": POOL}).items)


def test_a_node_leases_an_address_that_another_one_cedes(
    server: ApiServer, node_a: KubernetesApi, tmp_path: Path
) -> None:
    spec = PoolSpec(range=RANGE, network_name="cedes", ceding=True)
    pool = server.admin.create(AddressPool(metadata=Meta(name=POOL), spec=spec))
    ready = Condition(
        type="Ready",
        status="True",
        reason="Decided",
        last_transition_time="2026-11-23T07:00:00Z",
        observed_generation=1,
    )
    status = PoolStatus(space="cedes", block_size=4, conditions=(ready,))
    server.admin.update_status(replace(pool, status=status))
    holder, borrower = (RealNode(server, tmp_path / each, name(each)) for each in ("has", "lacks"))
    for number in range(4):  # of both blocks
        holder.add(f"p{number}", dict(IPAM))
    with pytest.raises(CNIError) as refused:
        borrower.add("q", dict(IPAM))
    assert refused.value.code == Code.TRY_AGAIN
    (asked,) = server.admin.list(AddressRequest, {"spec.pool": POOL}).items
    assert asked.spec.node == borrower.name

    # What the controller does.
    free = next(
        f"10.78.0.{each}" for each in range(6, 0, -1) if f"10.78.0.{each}" not in holder.held()
    )
    cover = next(
        each for each in blocks(server) if (each.spec.first == "10.78.0.4") == (free > "10.78.0.3")
    )
    server.admin.update(replace(cover, spec=replace(cover.spec, cede_wanted=(free,))))
    server.admin.update_status(replace(asked, status=RequestStatus(offers=(free,))))

    holder.lessee._sharing.notice(cover.metadata.name)
    holder.steps(1, 2.0)
    ceding = server.admin.get(AddressBlock, cover.metadata.name)
    assert (ceding.spec.ceded, ceding.spec.cede_wanted) == ((free,), ())
    borrower.clock.now += 2.0
    assert borrower.add("q", dict(IPAM)) == [free]
    (sub_block,) = server.admin.list(AddressBlock, {"spec.cover": cover.metadata.name}).items
    assert (sub_block.spec.state, sub_block.spec.holder.node) == ("Active", borrower.name)
    assert not server.admin.list(AddressRequest, {"spec.pool": POOL}).items

    holder.steps(2, REVIEW_EVERY)
    assert server.admin.get(AddressBlock, cover.metadata.name).spec.ceded == (free,)
    borrower.delete("q")
    borrower.steps(3, 3.0)
    holder.steps(3, REVIEW_EVERY)
    taken_back = server.admin.get(AddressBlock, cover.metadata.name)
    assert (taken_back.spec.ceded, taken_back.spec.recalled) == ((), (free,))
    for block in blocks(server):
        server.admin.delete(block)
    server.admin.delete(server.admin.get(AddressPool, POOL))
