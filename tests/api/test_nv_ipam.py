"""nv-ipam's pools on a real API server, with the rights and the tokens of agents."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from ipaddress import ip_interface
from pathlib import Path
from typing import Any

import pytest

from cni.spec.errors import CNIError, Code
from cni.spec.result import Result, encode
from ipam.leases.objects import AddressBlock, AddressPool
from tests.api import nv_ipam
from tests.api.nv_ipam import NAMESPACE, ApiNode, put_entries, put_pool, settling
from tests.api.server import ApiServer, name
from tests.cluster import programs
from tests.unit.ipam.nv_ipam.nodes import duplicates
from tests.waiting import until

Nodes = Callable[[str], ApiNode]


@pytest.fixture
def kinds(server: ApiServer) -> Iterator[ApiServer]:
    """The server with nv-ipam's kinds. The test's objects are deleted, because other tests count
    them."""
    if server.send("GET", f"/api/v1/namespaces/{NAMESPACE}")[0] != 200:
        nv_ipam.install(server)
    nv_ipam.remove_pools(server)
    yield server
    nv_ipam.remove_pools(server)
    for pool in server.admin.list(AddressPool).items:
        if pool.spec.network_name.startswith("nv-ipam/"):
            for block in server.admin.list(AddressBlock, {"spec.pool": pool.metadata.name}).items:
                server.admin.delete(block)
            server.admin.delete(pool)


@pytest.fixture
def nodes(kinds: ApiServer, tmp_path: Path) -> Iterator[Nodes]:
    """A function that makes nodes."""
    with ExitStack() as stack:

        def make(node: str) -> ApiNode:
            made = ApiNode(kinds, tmp_path, node)
            # Other tests count the Node objects.
            stack.callback(kinds.kubectl, "delete", "node", node, "--ignore-not-found")
            stack.callback(lambda: made.pools.close())
            return made

        yield make


def added(
    node: ApiNode,
    pod: str,
    ipam: dict[str, object],
    settle: Callable[[], None],
    config: dict[str, Any] | None = None,
) -> Result:
    """The result of an ADD, repeated as a runtime does. Raises CNIError if it must not be
    repeated."""
    found: list[Result] = []

    def tried() -> bool:
        settle()
        node.lessee.step()
        try:
            found.append(node.result(pod, ipam, config=config or {}))
        except CNIError as error:
            if error.code != Code.TRY_AGAIN:
                raise
            return False
        return True

    until(tried, what=f"address for {pod}", pause=0.2)
    return found[0]


def test_nodes_lease_blocks_of_an_ippool_and_leave_alone_what_others_may_hold(
    kinds: ApiServer, nodes: Nodes
) -> None:
    pool, settle = name("leased"), settling(kinds)
    put_pool(
        kinds,
        "ippools",
        pool,
        {
            "subnet": "10.7.0.0/26",
            "perNodeBlockSize": 6,
            "gateway": "10.7.0.1",
            "defaultGateway": True,
        },
    )
    ipam: dict[str, object] = {"poolName": pool}
    a, b = nodes(name("a")), nodes(name("b"))
    entry = {"nodeName": "elsewhere", "startIP": "10.7.0.2", "endIP": "10.7.0.40"}
    mine = {"nodeName": a.name, "startIP": "10.7.0.41", "endIP": "10.7.0.45"}
    put_entries(kinds, "ippools", pool, [entry, mine])
    until(
        lambda: all(
            f"ippool/{pool}" in node.known and node.known[f"ippool/{pool}"].others
            for node in (a, b)
        ),
        what="the pool on both nodes",
    )
    given = [
        added(node, f"{node.name}-{number}", ipam, settle).ips[0].address
        for number in range(5)
        for node in (a, b)
    ]
    last = {int(address.partition("/")[0].rpartition(".")[2]) for address in given}
    assert len(last) == 10
    assert min(last) > 40
    assert {address.partition("/")[2] for address in given} == {"26"}
    assert not duplicates((a, b))
    put_entries(kinds, "ippools", pool, [])
    # The rest of the pool is free now. One block is full, and the node leases another one.
    assert all(added(b, f"more-{number}", ipam, settle) for number in range(8))
    assert not duplicates((a, b))
    result = added(a, "routed", ipam, settle)
    assert result.ips[0].gateway == "10.7.0.1"
    assert [route.dst for route in result.routes] == ["0.0.0.0/0"]


def test_adds_and_deletions_need_no_server_nor_do_new_agents(
    kinds: ApiServer, nodes: Nodes
) -> None:
    pool, settle, a = name("routed"), settling(kinds), nodes(name("cut-off"))
    ipam: dict[str, object] = {"poolName": pool, "poolType": "cidrpool"}
    put_pool(
        kinds,
        "cidrpools",
        pool,
        {"cidr": "10.4.0.0/16", "perNodeNetworkPrefix": 29, "gatewayIndex": 1},
    )
    put_entries(
        kinds,
        "cidrpools",
        pool,
        [{"nodeName": a.name, "prefix": "10.4.0.8/29", "gateway": "10.4.0.9"}],
    )
    until(
        lambda: f"cidrpool/{pool}" in a.known and a.known[f"cidrpool/{pool}"].own != "",
        what="the pool on the node",
    )
    assert added(a, "p0", ipam, settle).ips[0].address == "10.4.0.10/29"
    kinds.plane.stop_api_server()
    try:
        for number in range(4):
            assert a.add(f"p{number + 1}", ipam) == [f"10.4.0.{11 + number}/29"]
            a.pools.close()
            a.restart()
        for number in range(5):
            a.delete(f"p{number}")
            assert a.add(f"q{number}", ipam) == [f"10.4.0.{10 + number}/29"]
    finally:
        kinds.plane.start_api_server()


POOLS: dict[str, tuple[str, dict[str, object]]] = {
    "plain": ("ippools", {"subnet": "10.20.0.0/24", "perNodeBlockSize": 8}),
    "gated": (
        "ippools",
        {
            "subnet": "10.21.0.0/16",
            "perNodeBlockSize": 50,
            "gateway": "10.21.0.1",
            "defaultGateway": True,
            "routes": [{"dst": "10.99.0.0/16"}, {"dst": "10.30.0.0/16"}, {"dst": "10.30.0.0/16"}],
            "exclusions": [{"startIP": "10.21.0.3", "endIP": "10.21.0.5"}],
            "perNodeExclusions": [{"startIndex": 0, "endIndex": 1}],
        },
    ),
    "six": (
        "ippools",
        {"subnet": "fd00:5::/64", "perNodeBlockSize": 16, "gateway": "fd00:5::ff"},
    ),
    "routed": (
        "cidrpools",
        {
            "cidr": "10.22.0.0/16",
            "perNodeNetworkPrefix": 29,
            "gatewayIndex": 1,
            "routes": [{"dst": "10.22.0.0/16"}],
            "perNodeExclusions": [{"startIndex": 2, "endIndex": 2}],
        },
    ),
    "points": ("cidrpools", {"cidr": "10.23.0.0/24", "perNodeNetworkPrefix": 31}),
    "routed6": (
        "cidrpools",
        {"cidr": "fd00:6::/48", "perNodeNetworkPrefix": 125, "gatewayIndex": 7},
    ),
}
"""Name, and kind with spec."""

CASES: list[tuple[dict[str, object], dict[str, object]]] = [
    ({"poolName": "plain"}, {}),
    ({"poolName": "gated"}, {}),
    ({"poolName": "gated,six"}, {}),
    ({"poolName": "six"}, {}),
    ({"poolName": "routed", "poolType": "cidrpool"}, {}),
    ({"poolName": "routed,routed6", "poolType": "CIDRPool"}, {}),
    ({"poolName": "points", "poolType": "cidrpool"}, {}),
    ({"poolName": "none"}, {"args": {"cni": {"poolNames": ["gated"]}}}),
    ({"poolName": "none"}, {"args": {"cni": {"poolNames": ["routed6"], "poolType": "cidrpool"}}}),
    ({"poolName": "gated"}, {"args": {"cni": {"allocateIPWithIndex": 9}}}),
    ({"poolName": "gated"}, {"args": {"cni": {"allocateDefaultGateway": True}}}),
    ({"poolName": "plain"}, {"args": {"cni": {"ips": ["10.20.0.4"]}}}),
    ({"poolName": "plain"}, {"runtimeConfig": {"ips": ["10.20.0.4/24"]}}),
    ({}, {"name": "plain"}),
    # Requests that both refuse.
    ({"poolName": "none"}, {}),
    ({"poolType": "other"}, {}),
    ({"poolName": "plain"}, {"args": {"cni": {"allocateDefaultGateway": True}}}),
    ({"poolName": "gated"}, {"args": {"cni": {"allocateIPWithIndex": 50}}}),
    ({"poolName": "gated"}, {"args": {"cni": {"allocateIPWithIndex": -1}}}),
    ({"poolName": "gated"}, {"args": {"cni": {"allocateIPWithIndex": 0}}}),
    ({"poolName": "plain"}, {"args": {"cni": {"ips": ["10.99.0.4"]}}}),
]


@pytest.mark.long
def test_results_are_those_of_nv_ipams_own_daemon(
    kinds: ApiServer, nodes: Nodes, tmp_path: Path
) -> None:
    """Compare field by field; the addresses themselves need only be of the same network."""
    (built,) = programs.build([nv_ipam.PROGRAM])
    node, settle = nodes(name("same")), settling(kinds)
    (tmp_path / "theirs").mkdir()
    theirs = nv_ipam.NodeDaemon(kinds, built, tmp_path / "theirs", node.name)
    answers = []
    with (
        nv_ipam.controller(kinds, built / "ipam-controller", tmp_path / "controller.log"),
        theirs.running(),
    ):
        selects = {"key": "metadata.name", "operator": "In", "values": [node.name]}
        selector = {"nodeSelectorTerms": [{"matchFields": [selects]}]}
        for pool, (plural, spec) in POOLS.items():
            put_pool(kinds, plural, pool, spec | {"nodeSelector": selector})
        for pool, (plural, _) in POOLS.items():
            kind = {"poolName": pool, "poolType": plural.removesuffix("s")}
            config = theirs.config(kind)
            until(
                lambda config=config: theirs.call("ADD", config, "probe")[0] == 0,  # type: ignore[misc]
                what=f"their {pool}",
            )
            assert theirs.call("DEL", config, "probe")[0] == 0
        for number, (ipam, more) in enumerate(CASES):
            answers.append(theirs.call("ADD", theirs.config(ipam, **more), f"c{number}"))
            if "args" in more or "runtimeConfig" in more:
                theirs.call("DEL", theirs.config(ipam, **more), f"c{number}")
    keys = {f"{plural.removesuffix('s')}/{pool}" for pool, (plural, _) in POOLS.items()}
    until(lambda: keys <= node.known.keys(), what=f"all pools on the node, not {node.known}")
    for number, (ipam, more) in enumerate(CASES):
        code, answer = answers[number]
        usual = {"poolName": None, **ipam}
        if code or "allocateIPWithIndex" in str(more):  # with an IPPool a node has several blocks
            with pytest.raises(CNIError):
                node.result(f"c{number}", usual, config=more)
            continue
        ours = added(node, f"c{number}", usual, settle, more)
        assert compared(answer) == compared(encoded(ours)), (ipam, more)
        if "args" in more or "runtimeConfig" in more:
            node.delete(f"c{number}")


def encoded(result: Result) -> dict[str, Any]:
    """A result in the form that the executable prints."""
    printed: dict[str, Any] = json.loads(encode(result, "1.0.0"))
    return printed


def compared(result: dict[str, Any]) -> dict[str, Any]:
    """A result with networks in place of addresses; empty parts count as missing."""
    ips = [
        ip | {"address": str(ip_interface(ip["address"]).network)} for ip in result.get("ips", ())
    ]
    return {key: value for key, value in {**result, "ips": ips}.items() if value}
