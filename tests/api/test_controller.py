"""The controller on a real API server, with the rights that the chart gives it and no other."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from ipam.addresses import parse
from ipam.controller.leader import ControllerProcess
from ipam.controller.reclaim import Reclaim, ReclaimCounts
from ipam.controller.rounds import Rounds
from ipam.leases.block_layout import block_name, pool_name
from ipam.leases.objects import AddressBlock, AddressPool, BlockSpec, Holder, PoolSpec, ReclaimSpec
from kube.leadership import Leadership
from kube.resources import Lease, Meta, NotFound, Refused
from kube.transport import KubernetesApi
from tests.api.server import DEFINITIONS, ApiServer, name
from tests.unit.cli.commands import short_path
from tests.unit.ipam.controller.cluster import read_world
from tests.waiting import PATIENCE, join, until
from tools.manifests import CHECKOUT, NAMESPACE


@pytest.fixture(scope="module")
def kubeconfig(server: ApiServer) -> Path:
    """The configuration of a client with the controller's token."""
    request = {"expirationSeconds": 7200}
    return server.kubeconfig("controller", request, account="podfabric-controller")


@pytest.fixture
def controller(kubeconfig: Path) -> Iterator[KubernetesApi]:
    client = KubernetesApi(kubeconfig, writer="podfabric-controller", timeout=60.0)
    yield client
    client.close()


@pytest.fixture(scope="module")
def definitions(server: ApiServer) -> None:
    """Install the kind of definitions."""
    server.install_kind(DEFINITIONS)


def _define(server: ApiServer, ipam: dict[str, object]) -> str:
    config = {"cniVersion": "1.0.0", "type": "ipoib", "name": "fabric", "ipam": ipam}
    made: str = server.define(config)["metadata"]["name"]
    return made


def _pool(server: ApiServer, range_: str, network: str) -> AddressPool:
    """A pool whose lost nodes are fenced at once and freed after a second."""
    reclaim = ReclaimSpec(node_gone_after="0s", max_offline="1s")
    spec = PoolSpec(range=range_, network_name=network, reclaim=reclaim)
    meta = Meta(name=pool_name(network, range_))
    return server.admin.create(AddressPool(metadata=meta, spec=spec))


def _block(server: ApiServer, pool: AddressPool, first: str, node: str) -> AddressBlock:
    space = pool.spec.network_name
    spec = BlockSpec(
        pool=pool.metadata.name,
        range=f"{first}/29",
        holder=Holder(instance=name("store"), node=node),
        nonce=name("nonce"),
        max_offline_seconds=1,
    )
    named = block_name(space, parse(first), 29)
    return server.admin.create(AddressBlock(metadata=Meta(name=named), spec=spec))


def _conditions(pool: AddressPool) -> dict[str, str]:
    return {each.type: each.status for each in pool.status.conditions}


def test_a_definition_becomes_a_pool_that_is_ready(
    server: ApiServer, definitions: None, controller: KubernetesApi
) -> None:
    _define(server, {"type": "whereabouts", "range": "10.90.0.9/24"})
    _define(server, {"type": "podfabric-ipam", "range": "fd00:90::/64"})
    wrong = _define(server, {"type": "whereabouts", "range": "10.90.0.0/99"})
    rounds = Rounds(controller)
    rounds.round(read_world(controller, lambda: 0.0))
    for range_, size in (("10.90.0.0/24", 8), ("fd00:90::/64", 128)):
        pool = server.admin.get(AddressPool, pool_name("", range_))
        assert pool.status.block_size == size
        assert _conditions(pool) == {"Ready": "True", "Exhausted": "False", "Conflict": "False"}
    _, events = server.send("GET", "/api/v1/namespaces/default/events")
    (event,) = [each for each in events["items"] if each["involvedObject"]["name"] == wrong]
    assert event["reason"] == "NoAddressPool"
    assert "10.90.0.0/99" in event["message"]


def test_the_block_of_a_node_that_is_gone_is_fenced_and_freed(
    server: ApiServer, definitions: None, controller: KubernetesApi
) -> None:
    pool = _pool(server, "10.92.0.0/24", name("net"))
    server.node(name("well"))
    block = _block(server, pool, "10.92.0.8", name("gone"))
    now, counts = [100.0], ReclaimCounts()
    reclaim = Reclaim(controller, lambda: now[0], counts, margin=1.0)
    rounds = Rounds(controller, clock=lambda: now[0], reclaim=reclaim)
    states: list[str] = []
    for _ in range(5):
        rounds.round(read_world(controller, lambda: now[0]))
        now[0] += 1
        try:
            states.append(server.admin.get(AddressBlock, block.metadata.name).spec.state)
        except NotFound:
            states.append("")
    assert states == ["Reclaiming", "Reclaiming", "Draining", "Draining", "Draining"]
    assert (counts.fenced, counts.freed) == (1, 1)
    assert server.admin.get(AddressBlock, block.metadata.name).spec.probe


def test_it_may_not_do_what_it_does_not_need(server: ApiServer, controller: KubernetesApi) -> None:
    pool = _pool(server, "10.94.0.0/24", name("net"))
    with pytest.raises(Refused):
        controller.update(replace(pool, spec=replace(pool.spec, block_size=16)))
    with pytest.raises(Refused):
        controller.create(_unmade(_block(server, pool, "10.94.0.8", name("node"))))
    with pytest.raises(Refused):
        controller.get(Lease, "another", NAMESPACE)


def _unmade(block: AddressBlock) -> AddressBlock:
    spec = replace(block.spec, range="10.94.0.16/29")
    named = block_name(block.space, parse("10.94.0.16"), 29)
    return AddressBlock(metadata=Meta(name=named), spec=spec)


def test_the_process_leads_follows_and_gives_its_lease_back(
    server: ApiServer, definitions: None, kubeconfig: Path
) -> None:
    clients = [KubernetesApi(kubeconfig, writer="podfabric-controller") for _ in range(2)]
    leadership = Leadership(clients[1], NAMESPACE, "podfabric-controller", "only")
    process = ControllerProcess(clients[0], leadership)
    thread = threading.Thread(target=process.run)
    thread.start()
    try:
        until(lambda: process.rounds > 0)
        assert _leader(server) == "only"
        pool = _pool(server, "10.95.0.0/24", name("net"))
        until(lambda: server.admin.get(AddressPool, pool.metadata.name).status.block_size == 8)
        _define(server, {"type": "whereabouts", "range": "10.97.0.0/24"})
        until(lambda: pool_name("", "10.97.0.0/24") in _ready(server), pause=0.1)
    finally:
        process.stop()
        join(thread)
    assert _leader(server) == ""
    # A concurrent write, or its own write that its mirror had not shown yet.
    assert process.errors.keys() <= {
        ("update", "Conflict"),
        ("create", "AlreadyExists"),
    }


def _leader(server: ApiServer) -> str:
    return server.admin.get(Lease, "podfabric-controller", NAMESPACE).spec.holder_identity


def _ready(server: ApiServer) -> set[str]:
    pools = server.admin.list(AddressPool).items
    return {pool.metadata.name for pool in pools if _conditions(pool).get("Ready") == "True"}


def test_podfabric_controller_serves_until_sigterm(
    server: ApiServer, definitions: None, kubeconfig: Path
) -> None:
    with short_path() as directory:
        health = directory / "health"
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", "from cli.main import main; main()", "controller"),
                *("--kubeconfig", str(kubeconfig), "--metrics", "", "--health", f"unix:{health}"),
            ],
            cwd=CHECKOUT,
        )
        try:
            until(lambda: b"leads" in _asked(health))
            pool = _pool(server, "10.96.0.0/24", name("net"))
            until(lambda: server.admin.get(AddressPool, pool.metadata.name).status.block_size == 8)
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
            process.wait()
    assert _leader(server) == ""


def _asked(path: Path) -> bytes:
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
            return b"".join(iter(lambda: client.recv(4096), b""))
    except OSError:
        return b""
