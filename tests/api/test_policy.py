"""The rights of a node agent's token: everything with its own blocks, nothing with other nodes'."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from ipam.leases.objects import AddressBlock, AddressPool, BlockStatus, StickySpec
from kube.resources import NetworkDefinition, Node, NotFound, Refused
from kube.transport import KubernetesApi
from tests.api.conftest import NODE_A, NODE_B
from tests.api.server import ApiServer, name
from tests.unit.kube.contract import block, pool, reservation
from tests.waiting import until
from tools.manifests import NAMESPACE

OWNER = {"apiVersion": "v1", "kind": "Node", "name": NODE_B, "uid": "u"}


def test_an_agent_leases_uses_and_returns_its_own_blocks(
    server: ApiServer, node_a: KubernetesApi
) -> None:
    stored = node_a.create(block(node=NODE_A))
    used = node_a.update_status(replace(stored, status=BlockStatus(used=1, free=31)))
    adopted = replace(used.spec.holder, instance="another", boot="another")
    adopting = replace(used.spec, holder=adopted, epoch=2, state="Draining")
    last = node_a.update(replace(used, spec=adopting))
    fields = {"spec.holder.instance": "another", "spec.holder.node": NODE_A}
    assert last in node_a.list(AddressBlock, fields).items
    node_a.delete(last)
    made = server.admin.create(pool())
    assert node_a.get(AddressPool, made.metadata.name) == made


def refused(act: Callable[[], object], *words: str) -> None:
    """Check that the server refuses the call with these words."""
    with pytest.raises(Refused) as raised:
        act()
    for word in words:
        assert word in str(raised.value)


def test_an_agent_cannot_touch_a_block_of_another_node(
    server: ApiServer, node_a: KubernetesApi, node_b: KubernetesApi
) -> None:
    theirs = node_b.create(block(node=NODE_B))
    why = f"the agent of node {NODE_A} may not change what is of node {NODE_B}"
    holder = replace(theirs.spec.holder, node=NODE_A)
    taken = replace(theirs, spec=replace(theirs.spec, holder=holder, epoch=2))
    refused(lambda: node_a.update(taken), why)
    drained = replace(theirs, spec=replace(theirs.spec, state="Draining"))
    refused(lambda: node_a.update(drained), why)
    refused(lambda: node_a.update_status(replace(theirs, status=BlockStatus(used=9))), why)
    refused(lambda: node_a.delete(theirs), why)
    assert server.admin.get(AddressBlock, theirs.metadata.name) == theirs


def test_an_agent_cannot_lease_for_another_node(node_a: KubernetesApi) -> None:
    why = f"the agent of node {NODE_A} may not lease for node {NODE_B}"
    refused(lambda: node_a.create(block(node=NODE_B)), why)
    mine = node_a.create(block(node=NODE_A))
    given = replace(mine.spec, holder=replace(mine.spec.holder, node=NODE_B), epoch=2)
    refused(lambda: node_a.update(replace(mine, spec=given)), why)


@pytest.mark.parametrize(
    ("changes", "meta", "why"),
    [
        ({"state": "Draining"}, {}, "a lease begins as Active"),
        ({"epoch": 7}, {}, "with epoch 1"),
        ({}, {"finalizers": ("podfabric.io/keep",)}, "no finalizers"),
        ({}, {"owner_references": (OWNER,)}, "no owners"),
    ],
)
def test_agent_creates_no_block_of_another_form(
    node_a: KubernetesApi, changes: dict[str, Any], meta: dict[str, Any], why: str
) -> None:
    new = block(node=NODE_A)
    new = replace(new, spec=replace(new.spec, **changes), metadata=replace(new.metadata, **meta))
    refused(lambda: node_a.create(new), why)
    if meta:
        mine = node_a.create(block(node=NODE_A))
        changed = replace(mine, metadata=replace(mine.metadata, **meta))
        refused(lambda: node_a.update(changed), why)


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (BlockStatus(used=20, free=13), "must fit the size of the block"),
        (BlockStatus(holders={"32": "a/p net1"}), "must fit the size of the block"),
        (BlockStatus(holders={"x": "a/p net1"}), "must fit the size of the block"),
    ],
)
@pytest.mark.parametrize(("first", "prefix"), [("", 27), ("fd00:9::60", 123)])
def test_agent_reports_no_address_outside_its_block(
    node_a: KubernetesApi, first: str, prefix: int, status: BlockStatus, why: str
) -> None:
    mine = node_a.create(block(node=NODE_A, first=first, prefix=prefix))
    refused(lambda: node_a.update_status(replace(mine, status=status)), why)
    right = BlockStatus(used=2, free=30, holders={"0": "a/p net1", "31": "a/q net1"})
    node_a.delete(node_a.update_status(replace(mine, status=right)))


@pytest.mark.parametrize(
    ("kind", "about", "host", "is_written"),
    [
        ("Pod", "p", NODE_A, True),
        ("Node", NODE_A, NODE_A, True),
        ("Node", NODE_B, NODE_A, False),
        ("Secret", "s", NODE_A, False),
        ("Pod", "p", NODE_B, False),
        ("Pod", "p", "", False),
    ],
)
def test_an_agent_writes_events_in_the_name_of_its_node_and_on_what_it_works_with(
    server: ApiServer,
    node_a: KubernetesApi,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    about: str,
    host: str,
    is_written: bool,
) -> None:
    agent = server.client(server.plane.directory / f"{NODE_A}.kubeconfig", node=host)
    regarding = {"apiVersion": "v1", "kind": kind, "name": about, "uid": "u"}
    regarding |= {"namespace": "default"} if kind != "Node" else {}
    agent.report("Told", "a text", regarding)
    assert ("no event was written" in caplog.text) != is_written


def test_an_agent_takes_over_a_sticky_block_that_its_holder_let_go(
    server: ApiServer, node_a: KubernetesApi, node_b: KubernetesApi
) -> None:
    new = block(node=NODE_B)
    sticky = StickySpec(
        reservation="a/web", pod="web-0", ifname="net1", address=new.spec.range.partition("/")[0]
    )
    theirs = node_b.create(replace(new, spec=replace(new.spec, sticky=sticky)))
    holder = replace(theirs.spec.holder, node=NODE_A)
    taken = replace(theirs.spec, holder=holder, epoch=2)
    why = f"the agent of node {NODE_A} may not change what is of node {NODE_B}"
    refused(lambda: node_a.update(replace(theirs, spec=taken)), why)
    let_go = node_b.update(replace(theirs, spec=replace(theirs.spec, state="Draining")))
    refused(lambda: node_a.update_status(replace(let_go, status=BlockStatus(used=9))), why)
    refused(lambda: node_a.delete(let_go), why)
    kept = replace(let_go, spec=replace(taken, holder=theirs.spec.holder))
    refused(lambda: node_a.update(kept), f"may not lease for node {NODE_B}")
    mine = node_a.update(replace(let_go, spec=taken))
    assert mine.spec.holder.node == NODE_A
    refused(lambda: node_b.update(replace(mine, spec=replace(mine.spec, state="Draining"))), NODE_A)
    server.admin.delete(mine)


def test_an_agent_takes_over_no_other_block_that_drains(
    server: ApiServer, node_a: KubernetesApi, node_b: KubernetesApi
) -> None:
    theirs = node_b.create(block(node=NODE_B))
    let_go = node_b.update(replace(theirs, spec=replace(theirs.spec, state="Draining")))
    holder = replace(theirs.spec.holder, node=NODE_A)
    taken = replace(let_go, spec=replace(let_go.spec, holder=holder, epoch=2))
    refused(lambda: node_a.update(taken), f"may not change what is of node {NODE_B}")
    server.admin.delete(let_go)


def test_an_agent_writes_no_pool_and_no_reservation(
    server: ApiServer, node_a: KubernetesApi
) -> None:
    stored = server.admin.create(pool())
    refused(lambda: node_a.create(pool()), "403")
    drained = replace(stored, spec=replace(stored.spec, state="Draining"))
    refused(lambda: node_a.update(drained), "403")
    refused(lambda: node_a.update_status(stored), "403")
    refused(lambda: node_a.delete(stored), "403")
    refused(lambda: node_a.create(reservation()), "403")
    refused(lambda: node_a.list(Node), "403")
    refused(lambda: node_a.has_pods(NODE_B), "403")
    refused(lambda: node_a.list(NetworkDefinition), "403")


def test_a_token_of_no_pod_leases_nothing(server: ApiServer, node_a: KubernetesApi) -> None:
    unbound = server.client(server.kubeconfig(name("unbound"), {}))
    why = "the token of the agent names no node"
    refused(lambda: unbound.create(block(node=NODE_A)), why)
    mine = node_a.create(block(node=NODE_A))
    refused(lambda: unbound.delete(mine), why)
    unbound.close()


def test_a_token_ends_with_its_pod(server: ApiServer) -> None:
    gone = name("gone")
    node = server.node(gone)
    node.create(block(node=gone))
    server.kubectl("delete", "pod", f"agent-{gone}", "-n", NAMESPACE, "--force", "--grace-period=0")

    def is_refused() -> bool:
        try:
            node.get(AddressPool, "any")
        except Refused as error:
            return "401" in str(error)
        except NotFound:
            return False
        return False

    until(is_refused, what="401", pause=0.2)
    node.close()
