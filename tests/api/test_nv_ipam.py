"""nv-ipam's pools on a real API server, with the rights and the tokens of agents."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from ipaddress import ip_interface
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from cni.spec.result import Result, encode
from ipam.cluster.api import Refused
from ipam.cluster.kubernetes_api import KubernetesApi
from ipam.cluster.nv_ipam.shares import share_name
from ipam.cluster.objects import AddressShare, Holder, Meta, ShareSpec
from tests.api import nv_ipam
from tests.api.conftest import NODE_A
from tests.api.nv_ipam import ApiNode, put_entries, put_pool
from tests.api.server import ApiServer, name
from tests.cluster import programs
from tests.unit.ipam.cluster.nv_ipam.nodes import duplicates
from tests.waiting import until
from tools.manifests import NAMESPACE

Nodes = Callable[[str], ApiNode]
ROUTED = {"poolName": "routed", "poolType": "cidrpool"}


@pytest.fixture(scope="module")
def kinds(server: ApiServer, node_a: KubernetesApi) -> ApiServer:
    """The server, with nv-ipam's kinds."""
    nv_ipam.install(server)
    return server


@pytest.fixture
def nodes(kinds: ApiServer, tmp_path: Path) -> Iterator[Nodes]:
    """Makes nodes whose agents follow."""
    with ExitStack() as stack:

        def make(node: str) -> ApiNode:
            made = ApiNode(kinds, tmp_path, node)
            # Other tests count the Node objects.
            stack.callback(kinds.kubectl, "delete", "node", node, "--ignore-not-found")
            stack.callback(lambda: made.service.close())
            return made

        yield make


def gets(node: ApiNode, pod: str, wanted: str, ipam: dict[str, object] | None = None) -> None:
    """Wait until an ADD succeeds, as a runtime repeats it; it gives the wanted address."""
    found: list[str] = []

    def added() -> bool:
        try:
            found.extend(node.add(pod, ipam))
        except CNIError as error:
            assert error.code in (Code.TRY_AGAIN, Code.NO_FREE_ADDRESS), error
            return False
        return True

    until(added, what=f"address for {pod} on {node.name}", pause=0.1)
    assert found == [wanted]


def entry(node: str, first: str, last: str) -> dict[str, str]:
    return {"nodeName": node, "startIP": first, "endIP": last}


def conditions(server: ApiServer, key: str, node: str) -> dict[str, str]:
    """Messages of the share's true conditions."""
    (share,) = server.admin.list(AddressShare, {"spec.node": node, "spec.pool": key}).items
    return {each.type: each.message for each in share.status.conditions if each.status == "True"}


def test_an_entry_that_moves_gives_no_address_twice_and_both_nodes_say_so(
    kinds: ApiServer, nodes: Nodes
) -> None:
    pool, a, b = name("pool"), nodes(name("moved")), nodes(name("moved"))
    ipam: dict[str, object] = {"poolName": pool}
    put_pool(kinds, "ippools", pool, {"subnet": "10.3.0.0/24", "perNodeBlockSize": 4})
    put_entries(kinds, "ippools", pool, [entry(a.name, "10.3.0.1", "10.3.0.4")])
    gets(a, "p0", "10.3.0.1/24", ipam)
    put_entries(kinds, "ippools", pool, [entry(b.name, "10.3.0.1", "10.3.0.4")])
    gets(b, "q0", "10.3.0.2/24", ipam)
    with pytest.raises(CNIError, match="gives this node no addresses"):
        a.add("p1", ipam)
    key = f"ippool/{pool}"
    until(lambda: "Outside" in conditions(kinds, key, a.name), what="condition Outside")
    assert b.name in conditions(kinds, key, a.name)["Outside"]
    until(lambda: "Blocked" in conditions(kinds, key, b.name), what="condition Blocked")
    assert a.name in conditions(kinds, key, b.name)["Blocked"]
    assert not duplicates((a, b))
    assert b.add("q1", ipam) == ["10.3.0.3/24"]
    assert b.add("q2", ipam) == ["10.3.0.4/24"]
    a.delete("p0")
    gets(b, "q3", "10.3.0.1/24", ipam)
    until(lambda: not conditions(kinds, key, b.name), what="end of the condition")


def test_adds_and_deletions_need_no_server_nor_do_new_agents(
    kinds: ApiServer, nodes: Nodes
) -> None:
    pool, a = name("routed"), nodes(name("cut-off"))
    ipam: dict[str, object] = {"poolName": f"cidrpool/{pool}"}
    put_pool(kinds, "cidrpools", pool, {"cidr": "10.4.0.0/16", "perNodeNetworkPrefix": 29})
    put_entries(
        kinds,
        "cidrpools",
        pool,
        [{"nodeName": a.name, "prefix": "10.4.0.8/29", "gateway": "10.4.0.9"}],
    )
    gets(a, "p0", "10.4.0.10/29", ipam)
    kinds.plane.stop_api_server()
    try:
        for number in range(4):
            assert a.add(f"p{number + 1}", ipam) == [f"10.4.0.{11 + number}/29"]
            a.service.close()
            a.start()
        for number in range(5):
            a.delete(f"p{number}")
            gets(a, f"q{number}", f"10.4.0.{10 + number}/29", ipam)
    finally:
        kinds.plane.start_api_server()


def test_a_requested_address_is_one_nodes_at_a_time(kinds: ApiServer, nodes: Nodes) -> None:
    pool, a, b = name("asked"), nodes(name("asking")), nodes(name("asking"))
    ipam: dict[str, object] = {"poolName": pool}
    put_pool(kinds, "ippools", pool, {"subnet": "10.5.0.0/24", "perNodeBlockSize": 4})
    put_entries(
        kinds,
        "ippools",
        pool,
        [entry(a.name, "10.5.0.1", "10.5.0.4"), entry(b.name, "10.5.0.5", "10.5.0.8")],
    )
    gets(a, "p0", "10.5.0.1/24", ipam)
    gets(b, "q0", "10.5.0.5/24", ipam)
    ask = {"args": {"cni": {"ips": ["10.5.0.200"]}}}
    assert a.add("p1", ipam, config=ask) == ["10.5.0.200/24"]
    with pytest.raises(CNIError, match=f"in use on node {a.name}"):
        b.add("q1", ipam, config=ask)


def left_to_older(node: ApiNode, key: str) -> int:
    """How many addresses of its entry the node leaves to older pools."""
    state = node.service.follower.states.get(key)
    return state.overlap if state is not None else 0


def test_pools_that_overlap_give_no_address_twice_and_it_is_told_within_ten_seconds(
    kinds: ApiServer, nodes: Nodes
) -> None:
    old, young = name("a-old"), name("b-young")
    a, b = nodes(name("overlap-a")), nodes(name("overlap-b"))
    first, second = ("10.14.0.1", "10.14.0.4"), ("10.14.0.5", "10.14.0.8")
    for pool in (old, young):
        put_pool(kinds, "ippools", pool, {"subnet": "10.14.0.0/24", "perNodeBlockSize": 4})
    put_entries(kinds, "ippools", old, [entry(a.name, *first), entry(b.name, *second)])
    put_entries(kinds, "ippools", young, [entry(a.name, *second), entry(b.name, *first)])
    for node, address in ((a, first[0]), (b, second[0])):
        gets(node, "p", f"{address}/24", {"poolName": old})
        until(partial(left_to_older, node, f"ippool/{young}"), seconds=10.0, what="the metric")
        with pytest.raises(CNIError, match=f"ippool/{old}, which is older") as caught:
            node.add("q", {"poolName": young})
        assert caught.value.code == Code.NO_FREE_ADDRESS

    def told() -> str:
        listed = kinds.kubectl("-n", nv_ipam.NAMESPACE, "get", "events", "-o", "json")
        return "".join(
            each["message"]
            for each in json.loads(listed)["items"]
            if each["reason"] == "AddressesOverlap" and young == each["involvedObject"]["name"]
        )

    until(lambda: a.name in told() and b.name in told(), what="the events", seconds=10.0)
    annotated = ("ippool.nv-ipam.nvidia.com", young, "ipam.podfabric.io/private=true")
    kinds.kubectl("-n", nv_ipam.NAMESPACE, "annotate", *annotated)
    gets(b, "q", f"{first[0]}/24", {"poolName": young})


def test_an_agent_writes_no_share_of_another_node(kinds: ApiServer, node_a: KubernetesApi) -> None:
    def share(node: str) -> AddressShare:
        holder = Holder(instance="store", node=node)
        ranges = ("10.6.0.1-10.6.0.9",)
        spec = ShareSpec(pool="ippool/p", node=node, ranges=ranges, holder=holder)
        return AddressShare(metadata=Meta(name=share_name("ippool/p", node, "store")), spec=spec)

    own = node_a.create(share(NODE_A))
    with pytest.raises(Refused, match="may not lease for node other"):
        node_a.create(share("other"))
    other = kinds.admin.create(share("other"))
    with pytest.raises(Refused, match="may not change what is of node other"):
        node_a.delete(other)
    for each in (own, other):
        kinds.admin.delete(each)


def test_another_machine_of_a_name_leaves_the_share_of_the_first_one_alone(
    kinds: ApiServer, tmp_path: Path
) -> None:
    pool, node = name("named"), name("again")
    ipam: dict[str, object] = {"poolName": pool}
    put_pool(kinds, "ippools", pool, {"subnet": "10.9.0.0/24", "perNodeBlockSize": 4})
    put_entries(kinds, "ippools", pool, [entry(node, "10.9.0.1", "10.9.0.4")])
    by_machine: dict[str, ApiNode] = {}

    def shares() -> dict[str, AddressShare]:
        fields = {"spec.node": node, "spec.pool": f"ippool/{pool}"}
        listed = kinds.admin.list(AddressShare, fields).items
        return {each.holder.machine_id: each for each in listed}

    try:
        old = by_machine["old"] = ApiNode(kinds, tmp_path, node, "old")
        gets(old, "p0", "10.9.0.1/24", ipam)
        before = shares()["old"]
        old.service.close()
        kinds.kubectl("delete", "node", node)
        agent = f"agent-{node}"
        kinds.kubectl("-n", NAMESPACE, "delete", "pod", agent, "--force", "--grace-period=0")
        new = by_machine["new"] = ApiNode(kinds, tmp_path, node, "new")
        key = f"ippool/{pool}"
        until(
            lambda: key in new.service.follower.states and new.service.follower.states[key].blocked,
            what="blocked addresses",
        )
        with pytest.raises(CNIError):
            new.add("q0", ipam)
        assert shares()["old"] == before
        assert shares().keys() == {"old", "new"}
        # The old machine runs on its own: its file is its word.
        assert old.add("p1", ipam) == ["10.9.0.2/24"]
        with pytest.raises(Refused, match="keeps the instance"):
            taken = replace(before.spec, holder=shares()["new"].holder)
            new.client.update(replace(before, spec=taken))
        # Somebody says that it is off; the watch of the new one shows that.
        kinds.admin.delete(before)
        gets(new, "q0", "10.9.0.1/24", ipam)
    finally:
        for each in by_machine.values():
            each.service.close()
        kinds.kubectl("delete", "node", node, "--ignore-not-found")


@pytest.mark.long
def test_with_nv_ipams_own_controller_no_churn_gives_an_address_twice(
    kinds: ApiServer, nodes: Nodes, tmp_path: Path
) -> None:
    """Rows 1 to 4 of what goes wrong there: node deleted, label lost, block size, typo."""
    (built,) = programs.build([nv_ipam.PROGRAM])
    prefix = name("cut")
    cut = [nodes(f"{prefix}-{letter}") for letter in "abcdefgh"]
    by_name = {node.name: node for node in cut}
    pool = name("cut")
    ipam: dict[str, object] = {"poolName": pool}
    where = f"/apis/{nv_ipam.API}/namespaces/{nv_ipam.NAMESPACE}/ippools/{pool}"
    selects: dict[str, object] = {"key": "cut", "operator": "In", "values": [prefix]}
    spec: dict[str, object] = {
        "subnet": "10.7.0.0/24",
        "perNodeBlockSize": 4,
        "nodeSelector": {"nodeSelectorTerms": [{"matchExpressions": [selects]}]},
    }

    def label(node: str, value: str) -> None:
        kinds.kubectl("label", "node", node, "--overwrite", f"cut={value}")

    def entries() -> dict[str, str]:
        _, found = kinds.send("GET", where)
        allocations = found.get("status", {}).get("allocations") or []
        return {each["nodeName"]: each["startIP"] for each in allocations}

    number = 0

    def work() -> None:
        """Each node takes what it can, at most three pods."""
        nonlocal number
        for node in cut:
            for _ in range(3):
                number += 1
                try:
                    node.add(f"p{number}", ipam)
                except CNIError as error:
                    assert error.code in (Code.NO_FREE_ADDRESS, Code.TRY_AGAIN), error
        assert not duplicates(cut)

    def settled(wanted: set[str]) -> None:
        until(lambda: entries().keys() == wanted, what=f"entries of {sorted(wanted)}")
        for _ in range(2):
            work()
        key = f"ippool/{pool}"
        until(
            lambda: all(by_name[each].service.follower.states[key].entry for each in wanted),
            what="entries on the nodes",
        )
        work()

    with nv_ipam.controller(kinds, built / "ipam-controller", tmp_path / "controller.log"):
        for node in cut[:6]:
            label(node.name, prefix)
        put_pool(kinds, "ippools", pool, spec)
        all_six = {node.name for node in cut[:6]}
        settled(all_six)
        # A label is gone for a moment, and a new node takes the entry.
        label(cut[1].name, "none")
        label(cut[6].name, prefix)
        settled(all_six - {cut[1].name} | {cut[6].name})
        label(cut[1].name, prefix)
        settled(all_six | {cut[6].name})
        # A Node object is deleted.
        kinds.kubectl("delete", "node", cut[2].name)
        label(cut[7].name, prefix)
        rest = {node.name for node in cut} - {cut[2].name}
        settled(rest)
        # The size is edited, and then the gateway is wrong for a while.
        put_pool(kinds, "ippools", pool, spec | {"perNodeBlockSize": 2})
        settled(rest)
        put_pool(kinds, "ippools", pool, spec | {"gateway": "10.99.0.1"})
        until(lambda: not entries(), what="no entries")
        work()
        put_pool(kinds, "ippools", pool, spec)
        settled(rest)
        moved = [node for node in cut if node.service.follower.states[f"ippool/{pool}"].outside]
        assert moved
        key = f"ippool/{pool}"
        until(
            lambda: all("Outside" in conditions(kinds, key, node.name) for node in moved),
            what="a condition of each",
        )


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
    # What both refuse.
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
    """Field by field, but for the addresses themselves, which are of the same network."""
    (built,) = programs.build([nv_ipam.PROGRAM])
    node = nodes(name("same"))
    (tmp_path / "theirs").mkdir()
    theirs = nv_ipam.NodeDaemon(kinds, built, tmp_path / "theirs", node.name)
    with (
        nv_ipam.controller(kinds, built / "ipam-controller", tmp_path / "controller.log"),
        theirs.running(),
    ):
        selects = {"key": "metadata.name", "operator": "In", "values": [node.name]}
        selector = {"nodeSelectorTerms": [{"matchFields": [selects]}]}
        for pool, (plural, spec) in POOLS.items():
            put_pool(kinds, plural, pool, spec | {"nodeSelector": selector})
        keys = {f"{plural.removesuffix('s')}/{pool}" for pool, (plural, _) in POOLS.items()}
        states = node.service.follower.states
        until(
            lambda: (
                keys <= {key for key, each in node.service.follower.states.items() if each.usable}
            ),
            what=f"entries of all pools, not {states}",
        )
        for pool, (plural, _) in POOLS.items():
            kind = {"poolName": pool, "poolType": plural.removesuffix("s")}
            config = theirs.config(kind)
            until(
                lambda config=config: theirs.call("ADD", config, "probe")[0] == 0,  # type: ignore[misc]
                what=f"their {pool}",
            )
            assert theirs.call("DEL", config, "probe")[0] == 0
        for number, (ipam, more) in enumerate(CASES):
            code, answer = theirs.call("ADD", theirs.config(ipam, **more), f"c{number}")
            usual = {"poolName": None, **ipam}
            try:
                ours = node.result(f"c{number}", usual, config=more)
            except CNIError:
                assert code != 0, (ipam, more, answer)
                continue
            assert code == 0, (ipam, more, answer)
            assert compared(answer) == compared(encoded(ours)), (ipam, more)
            if "args" in more or "runtimeConfig" in more:
                theirs.call("DEL", theirs.config(ipam, **more), f"c{number}")
                node.delete(f"c{number}")


def encoded(result: Result) -> dict[str, Any]:
    """A result as the executable prints it."""
    printed: dict[str, Any] = json.loads(encode(result, "1.0.0"))
    return printed


def compared(result: dict[str, Any]) -> dict[str, Any]:
    """A result with networks in place of addresses; empty parts count as missing."""
    ips = [
        ip | {"address": str(ip_interface(ip["address"]).network)} for ip in result.get("ips", ())
    ]
    return {key: value for key, value in {**result, "ips": ips}.items() if value}
