"""CIDRPools as podfabric's own on a real API server, beside nv-ipam's own controller and daemon."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from cni.spec.errors import CNIError, Code
from ipam.cluster.api import Refused
from ipam.cluster.controller.rounds import Rounds, read_world
from ipam.cluster.nv_ipam import entries as removed_entries
from ipam.cluster.nv_ipam.entries import StillThere
from ipam.confirmed import boottime
from tests.api import nv_ipam
from tests.api.nv_ipam import NAMESPACE, put_entries, put_pool
from tests.api.server import ApiServer, name
from tests.api.test_nv_ipam import compared, encoded
from tests.api.test_nv_ipam_own import OwnApiNode
from tests.api.test_nv_ipam_own import kinds as kinds  # a fixture
from tests.cluster import programs
from tests.waiting import until
from tools import manifests


@pytest.fixture
def nodes(kinds: ApiServer, tmp_path: Path) -> Iterator[list[OwnApiNode]]:
    """Two nodes whose agents' parts run."""
    with ExitStack() as stack:
        made = []
        for each in ("a", "b"):
            (tmp_path / each).mkdir(exist_ok=True)
            node = OwnApiNode(kinds, tmp_path, name(each), boottime)
            stack.callback(kinds.kubectl, "delete", "node", node.name, "--ignore-not-found")
            stack.callback(node.service.close)
            made.append(node)
        yield made


def entries(server: ApiServer, pool: str) -> list[dict[str, str]]:
    where = f"/apis/{nv_ipam.API}/namespaces/{NAMESPACE}/cidrpools/{pool}"
    _, found = server.send("GET", where)
    return list(found.get("status", {}).get("allocations") or [])


def selecting(nodes: list[OwnApiNode]) -> dict[str, object]:
    """What selects these nodes: Kubernetes takes one value of a field."""
    terms = [
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node.name]}]}
        for node in nodes
    ]
    return {"nodeSelectorTerms": terms}


def specs(nodes: list[OwnApiNode]) -> dict[str, dict[str, object]]:
    """Pools of these nodes, by their names."""
    b = nodes[1].name
    selector = selecting(nodes)
    return {
        name(each): spec | {"nodeSelector": selector}
        for each, spec in {
            "routed": {
                "cidr": "10.22.0.0/16",
                "perNodeNetworkPrefix": 29,
                "gatewayIndex": 1,
                "routes": [{"dst": "10.22.0.0/16"}],
                "perNodeExclusions": [{"startIndex": 2, "endIndex": 2}],
                "exclusions": [{"startIP": "10.22.0.0", "endIP": "10.22.0.7"}],
            },
            "static": {
                "cidr": "10.24.0.0/24",
                "perNodeNetworkPrefix": 28,
                "gatewayIndex": 2,
                "defaultGateway": True,
                "staticAllocations": [
                    {"nodeName": b, "prefix": "10.24.0.32/28", "gateway": "10.24.0.40"},
                    {"prefix": "10.24.0.0/28"},
                ],
            },
            "points": {"cidr": "10.23.0.0/24", "perNodeNetworkPrefix": 31, "gatewayIndex": 0},
            "six": {"cidr": "fd00:6::/48", "perNodeNetworkPrefix": 125, "gatewayIndex": 7},
        }.items()
    }


def round_of(server: ApiServer, rounds: Rounds) -> None:
    rounds.round(read_world(server.admin, time.monotonic, NAMESPACE))
    assert not rounds.steps.taken_errors()


def added(node: OwnApiNode, pod: str, ipam: dict[str, object], **how: Any) -> dict[str, Any]:  # noqa: ANN401
    found: list[dict[str, Any]] = []
    refused = ""

    def tried() -> bool:
        nonlocal refused
        try:
            found.append(encoded(node.result(pod, ipam, **how)))
        except CNIError as error:
            assert error.code == Code.TRY_AGAIN, error
            refused = error.message
            return False
        return True

    try:
        until(tried, what=f"address for {pod}", pause=0.2)
    except AssertionError as error:
        raise AssertionError(f"{error}: {refused}") from None
    return found[0]


@pytest.mark.long
def test_prefixes_and_results_are_those_of_nv_ipams_own_programs(
    kinds: ApiServer, nodes: list[OwnApiNode], tmp_path: Path
) -> None:
    """Row N14: nv-ipam cuts the pools, and then podfabric, from nothing."""
    (built,) = programs.build([nv_ipam.PROGRAM])
    a = nodes[0]
    pools = specs(nodes)
    wishes: list[dict[str, object]] = [
        {},
        {"allocateIPWithIndex": 1},
        {"allocateDefaultGateway": True},
    ]
    theirs: dict[str, list[dict[str, str]]] = {}
    answers: dict[tuple[str, int], tuple[int, dict[str, Any]]] = {}
    (tmp_path / "theirs").mkdir()
    daemon = nv_ipam.NodeDaemon(kinds, built, tmp_path / "theirs", a.name)
    with (
        nv_ipam.controller(kinds, built / "ipam-controller", tmp_path / "controller.log"),
        daemon.running(),
    ):
        for pool, spec in pools.items():
            put_pool(kinds, "cidrpools", pool, spec)
        for pool in pools:
            until(lambda pool=pool: len(entries(kinds, pool)) == 2, what=f"their {pool}")  # type: ignore[misc]
            theirs[pool] = entries(kinds, pool)
            kind = {"poolName": pool, "poolType": "cidrpool"}
            probe = daemon.config(kind)
            until(
                lambda probe=probe: daemon.call("ADD", probe, "probe")[0] == 0,  # type: ignore[misc]
                what=f"an address of their {pool}",
            )
            assert daemon.call("DEL", probe, "probe")[0] == 0
            for number, wish in enumerate(wishes):
                config = daemon.config(kind, args={"cni": wish})
                answers[pool, number] = daemon.call("ADD", config, f"c{number}")
                daemon.call("DEL", config, f"c{number}")
    rounds = Rounds(kinds.admin, nv_ipam=NAMESPACE)
    round_of(kinds, rounds)
    for pool, spec in pools.items():
        assert entries(kinds, pool) == theirs[pool]  # they are respected
        kinds.kubectl("-n", NAMESPACE, "delete", "cidrpool", pool)
        until(
            lambda pool=pool: f"cidrpool/{pool}" not in a.service.follower.states,  # type: ignore[misc]
            what=f"end of {pool}",
        )
        put_pool(kinds, "cidrpools", pool, spec)
    round_of(kinds, rounds)
    for pool in pools:
        assert entries(kinds, pool) == theirs[pool], pool
        for number, wish in enumerate(wishes):
            code, answer = answers[pool, number]
            ipam: dict[str, object] = {"poolName": pool, "poolType": "cidrpool"}
            how = {"config": {"args": {"cni": wish}}}
            if code:  # the index is the gateway's
                with pytest.raises(CNIError) as refused:
                    a.result(f"c{number}", ipam, **how)
                assert refused.value.code != Code.TRY_AGAIN, answer
                continue
            ours = added(a, f"c{number}", ipam, **how)
            assert compared(ours) == compared(answer), (pool, wish)
            if wish:
                assert ours["ips"] == answer["ips"], (pool, wish)
            a.delete(f"c{number}")


def test_nodes_have_prefixes_with_the_rights_of_the_chart(
    kinds: ApiServer, nodes: list[OwnApiNode]
) -> None:
    a, b = nodes
    pool = name("given")
    put_pool(
        kinds,
        "cidrpools",
        pool,
        {
            "cidr": "10.25.0.0/24",
            "perNodeNetworkPrefix": 29,
            "gatewayIndex": 1,
            "nodeSelector": selecting(nodes),
        },
    )
    ipam: dict[str, object] = {"poolName": pool, "poolType": "cidrpool"}
    put_entries(kinds, "cidrpools", pool, [{"nodeName": "gone", "prefix": "10.25.0.0/29"}])
    rounds = Rounds(kinds.admin, nv_ipam=NAMESPACE)
    round_of(kinds, rounds)
    found = {each["nodeName"]: each["prefix"] for each in entries(kinds, pool)}
    first, second = sorted((a.name, b.name))
    assert found == {"gone": "10.25.0.0/29", first: "10.25.0.8/29", second: "10.25.0.16/29"}
    node = a if a.name == first else b
    assert added(node, "p", ipam)["ips"] == [{"address": "10.25.0.10/29", "gateway": "10.25.0.9"}]
    # The word of an administrator, in the controller's pod.
    values = ("--set", f"ipam.nv_ipam=own,ipam.nv_ipam_namespace={NAMESPACE}")
    role = ("--show-only", "templates/cluster-addresses/agent.yaml")
    kinds.kubectl("apply", "-f", "-", stdin=manifests.template(*values, *role))
    kubeconfig = kinds.kubeconfig("entries", {}, account="podfabric-controller")
    removed: list[str] = []
    with closing(kinds.client(kubeconfig)) as controller:

        def is_removed() -> bool:
            try:
                removed.extend(removed_entries.remove(controller, NAMESPACE, "gone"))
            except Refused:  # the right is not known yet
                return False
            return True

        until(is_removed)
        assert removed == [f"cidrpool/{pool}"]
        with pytest.raises(StillThere, match=first):
            list(removed_entries.remove(controller, NAMESPACE, first))
    round_of(kinds, rounds)
    assert {each["nodeName"] for each in entries(kinds, pool)} == {first, second}
