"""IPAMClaims: pods that name one, one after the other, have its addresses on every node."""

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam.cluster.api import Refused
from ipam.cluster.ipam_claims import IPAMClaim, IPAMClaimStatus, PodObject
from ipam.cluster.objects import AddressBlock, AddressReservation, Condition
from tests.fake_api import FakeApi, Fault
from tests.ipam_claims import claim, delete, pod, selection
from tests.unit.ipam.calls import Json, error_of, request
from tests.unit.ipam.cluster.audit import audit, audit_settled
from tests.unit.ipam.cluster.nodes import RANGE, ClusterNode, put_pool
from tests.unit.ipam.cluster.test_crashes import Kill, Killed, armed, disarmed

IPAM: Json = {"range": RANGE}
PERSISTENT: Json = {"allowPersistentIPs": True}
REFERENCE = "ipam-claim-reference"


@pytest.fixture
def server() -> FakeApi:
    server = FakeApi()
    put_pool(server, size=1)
    server.put(claim())
    for name in ("vm-a", "vm-b", "vm-c"):
        server.put(pod(name))
    return server


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def nodes(server: FakeApi, memory_path: Path, stack: ExitStack) -> list[ClusterNode]:
    made = [ClusterNode(server, memory_path / name, f"node-{name}", kept=True) for name in "ab"]
    for node in made:
        node.clock = made[0].clock
        node.restart()
        stack.callback(node.close)
    return made


def add(node: ClusterNode, name: str, **how: Any) -> list[str]:  # noqa: ANN401 - of ClusterNode.add
    config = {**PERSISTENT, **how.pop("config", {})}
    return node.add(
        name, how.pop("ipam", IPAM), ifname=how.pop("ifname", "net1"), config=config, **how
    )


def let_go(*nodes: ClusterNode) -> None:
    for node in nodes:
        node.steps(3, 3.0)


def status(server: FakeApi, name: str = "vm") -> IPAMClaimStatus:
    return server.look(IPAMClaim, name, "ns").status


def blocks(server: FakeApi) -> list[tuple[str, str]]:
    """Node and state of each sticky block."""
    return [
        (block.spec.holder.node, block.spec.state)
        for block in server.look_at_all(AddressBlock).items
        if block.spec.sticky.reservation
    ]


def test_pods_of_a_claim_have_its_address_on_every_node(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    a, b = nodes
    given = add(a, "vm-a")
    assert status(server) == IPAMClaimStatus(ips=(f"{given[0]}/24",), owner_pod="vm-a")
    delete(a, "vm-a")
    let_go(a)
    assert blocks(server) == [("node-a", "Draining")]
    assert add(b, "vm-b") == given
    assert status(server).owner_pod == "vm-b"
    delete(b, "vm-b")
    let_go(b)
    assert add(b, "vm-c") == given
    assert len(blocks(server)) == 1
    audit_settled(server, nodes)


def test_the_reservation_of_a_claim_is_linked_to_it(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    """So Kubernetes deletes it after the claim."""
    add(nodes[0], "vm-a")
    (reservation,) = server.look_at_all(AddressReservation).items
    (link,) = reservation.metadata.owner_references
    uid = server.look(IPAMClaim, "vm", "ns").metadata.uid
    assert link == {
        "apiVersion": "k8s.cni.cncf.io/v1alpha1",
        "kind": "IPAMClaim",
        "name": "vm",
        "uid": uid,
    }
    assert (reservation.spec.owner.kind, reservation.spec.owner.name) == ("IPAMClaim", "vm")


def test_another_pod_on_the_node_comes_back_to_the_address_before_it_was_let_go(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    a = nodes[0]
    given = add(a, "vm-a")
    delete(a, "vm-a")
    assert add(a, "vm-b") == given
    let_go(a)
    assert blocks(server) == [("node-a", "Active")]


def test_two_pods_of_one_claim_at_once_are_refused(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    a, b = nodes
    add(a, "vm-a")
    here = error_of(lambda: add(a, "vm-b"))
    assert here.code == Code.TRY_AGAIN
    assert "IPAMClaim ns/vm, and pod ns/vm-a on this node has it" in here.message
    there = error_of(lambda: add(b, "vm-b"))
    assert there.code == Code.TRY_AGAIN
    assert "is reserved for IPAMClaim ns/vm, and node node-a still has it" in there.message
    assert status(server).owner_pod == "vm-a"
    assert len(blocks(server)) == 1


@pytest.mark.parametrize(("network", "interface"), [("other", "net1"), ("n1", "net2")])
def test_a_claim_of_another_network_or_interface_is_refused(
    server: FakeApi, nodes: list[ClusterNode], network: str, interface: str
) -> None:
    server.put(claim("theirs", network, interface))
    server.put(pod("vm-a", selection(**{REFERENCE: "theirs"})))
    error = error_of(lambda: add(nodes[0], "vm-a"))
    assert f"is for interface {interface} on network {network}" in error.message
    assert "for interface net1 on network n1" in error.message
    assert blocks(server) == []
    nodes[0].steps(2)
    (event,) = server.events
    assert (event.reason, event.regarding["name"]) == ("IPAMClaimRefused", "vm-a")


def test_a_definition_without_the_key_makes_no_call_in_a_warm_add(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    a = nodes[0]
    a.add("p", IPAM, ifname="net1")
    delete(a, "p")
    a.api.calls.clear()
    a.add("p", IPAM, ifname="net1")
    delete(a, "p")
    a.add("p", IPAM, ifname="net1", config={"allowPersistentIPs": False})
    assert not a.api.calls
    assert blocks(server) == []


def test_a_pod_that_names_no_claim_gets_any_address(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    a = nodes[0]
    for name, annotation in {
        "plain": "n1",
        "unnamed": selection(),
        "other-interface": selection(interface="eth7", **{REFERENCE: "vm"}),
    }.items():
        server.put(pod(name, annotation))
        assert add(a, name)
    assert blocks(server) == []
    assert a.plugin.add(request("ADD", IPAM, "c", ifname="net1", config=PERSISTENT))  # no pod


def test_the_claim_is_that_of_the_interface(server: FakeApi, nodes: list[ClusterNode]) -> None:
    server.put(claim("first", interface="net1"))
    server.put(claim("named", interface="pod7"))
    annotation = (
        '[{"name": "n1", "ipam-claim-reference": "first"},'
        ' {"name": "n1", "interface": "pod7", "ipam-claim-reference": "named"}]'
    )
    server.put(pod("vm-a", annotation))
    one = add(nodes[0], "vm-a", ifname="net1")
    two = add(nodes[0], "vm-a", ifname="pod7")
    assert status(server, "first").ips == (f"{one[0]}/24",)
    assert status(server, "named").ips == (f"{two[0]}/24",)


def test_a_claim_has_an_address_of_each_range(server: FakeApi, nodes: list[ClusterNode]) -> None:
    a, b = nodes
    put_pool(server, "fd00::/120", size=1)
    ipam: Json = {"ipRanges": [{"range": RANGE}, {"range": "fd00::/120"}]}
    given = add(a, "vm-a", ipam=ipam)
    assert status(server).ips == (f"{given[0]}/24", f"{given[1]}/120")
    delete(a, "vm-a")
    let_go(a)
    assert add(b, "vm-b", ipam=ipam) == given


def test_a_claim_gets_the_address_that_it_asks_for(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    a = nodes[0]
    server.put(claim("asks", requests=("10.0.0.77/24",)))
    server.put(pod("vm-a", selection(**{REFERENCE: "asks"})))
    assert add(a, "vm-a") == ["10.0.0.77"]
    server.put(claim("too", requests=("10.0.0.77/24",)))
    server.put(pod("vm-b", selection(**{REFERENCE: "too"})))
    error = error_of(lambda: add(a, "vm-b"))
    assert error.code == Code.ADDRESS_TAKEN
    assert "IPAMClaim ns/too names 10.0.0.77" in error.message
    server.put(claim("bad", requests=("10.0.0.88/24",)))
    server.put(pod("vm-c", selection(**{REFERENCE: "bad"})))
    error = error_of(lambda: add(a, "vm-c", ipam={**IPAM, "exclude": ["10.0.0.88/32"]}))
    assert error.code == Code.NO_FREE_ADDRESS


def test_a_claim_with_very_many_addresses_is_refused(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    asked = tuple(f"10.0.{number // 250}.{number % 250}/24" for number in range(65))
    server.put(claim("many", requests=asked))
    server.put(pod("vm-a", selection(**{REFERENCE: "many"})))
    error = error_of(lambda: add(nodes[0], "vm-a"))
    assert error.code == Code.TRY_AGAIN
    assert "IPAMClaim ns/many: status.ips or spec.ipRequests has 65 addresses" in error.message
    server.put(claim("many", requests=asked[1:]))
    assert set(add(nodes[0], "vm-a")) < {each.partition("/")[0] for each in asked}


def test_a_claim_whose_block_is_gone_gets_the_address_of_its_status(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    a, b = nodes
    given = add(a, "vm-a")
    delete(a, "vm-a")
    let_go(a)
    for block in server.look_at_all(AddressBlock).items:
        server.remove(AddressBlock, block.metadata.name)
    assert add(b, "vm-b") == given


def test_a_claim_made_again_is_another_one(server: FakeApi, nodes: list[ClusterNode]) -> None:
    a, b = nodes
    given = add(a, "vm-a")
    server.remove(IPAMClaim, "vm", "ns")
    server.put(claim())
    assert add(b, "vm-b") != given
    delete(a, "vm-a")
    let_go(a)
    audit(server, nodes)


def test_what_others_wrote_into_the_status_stays(server: FakeApi, nodes: list[ClusterNode]) -> None:
    condition = Condition(
        type="X",
        status="True",
        reason="Y",
        message="z",
        last_transition_time="2026-01-01T00:00:00Z",
    )
    server.put(
        replace(server.look(IPAMClaim, "vm", "ns"), status=IPAMClaimStatus(conditions=(condition,)))
    )
    add(nodes[0], "vm-a")
    assert status(server).conditions == (condition,)
    assert status(server).ips


def test_a_claim_that_is_missing_says_what_to_do(server: FakeApi, nodes: list[ClusterNode]) -> None:
    """As it is where the kind is not installed."""
    server.remove(IPAMClaim, "vm", "ns")
    error = error_of(lambda: add(nodes[0], "vm-a"))
    assert error.code == Code.TRY_AGAIN
    assert "get IPAMClaim vm" in error.message
    assert "kubectl get crd ipamclaims.k8s.cni.cncf.io" in error.message
    server.remove(PodObject, "vm-a", "ns")
    assert "the pod is gone" in error_of(lambda: add(nodes[0], "vm-a")).message
    assert "deleted and made again" in error_of(lambda: add(nodes[0], "vm-b", uid="former")).message


@pytest.mark.parametrize(
    ("kind", "fault", "words"),
    [
        ("Pod", Fault.REFUSED, "set ipam.ipamClaims to true"),
        ("IPAMClaim", Fault.LOST_REQUEST, "the runtime tries again"),
    ],
)
def test_without_an_answer_nothing_is_reserved(
    server: FakeApi, nodes: list[ClusterNode], kind: str, fault: Fault, words: str
) -> None:
    a = nodes[0]
    a.api.faults = lambda verb, asked, name: fault if asked == kind else None
    error = error_of(lambda: add(a, "vm-a"))
    assert error.code == Code.TRY_AGAIN
    assert words in error.message
    assert a.held() == set()


def test_an_address_that_cannot_be_written_into_the_claim_is_not_given(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    a = nodes[0]

    def refuse(verb: str, kind: str, name: str) -> Fault | None:
        return Fault.LOST_REQUEST if (verb, kind) == ("update_status", "IPAMClaim") else None

    a.api.faults = refuse
    error = error_of(lambda: add(a, "vm-a"))
    assert "the status of IPAMClaim ns/vm cannot be written" in error.message
    assert a.held() == set()
    a.api.faults = None
    assert len(add(a, "vm-a")) == 1
    assert len(blocks(server)) == 1


def test_a_kind_without_owner_pod_gets_the_addresses_alone(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    """As OpenShift 4.19 has it: the server refuses what it does not know."""
    a = nodes[0]
    refused: list[str] = []

    def once(verb: str, kind: str, name: str) -> None:
        if (verb, kind) == ("update_status", "IPAMClaim") and not refused:
            refused.append(name)
            raise Refused('update status of IPAMClaim vm: 400 unknown field "status.ownerPod"')

    a.api.faults = once
    given = add(a, "vm-a")
    assert status(server) == IPAMClaimStatus(ips=(f"{given[0]}/24",))


def test_addresses_by_name_and_a_claim_contradict_each_other(nodes: list[ClusterNode]) -> None:
    config = {"capabilities": {"ips": True}, "runtimeConfig": {"ips": ["10.0.0.9"]}}
    error = error_of(lambda: add(nodes[0], "vm-a", config=config))
    assert error.code == Code.INVALID_CONFIG
    assert "leave one of them out" in error.message


def test_a_node_alone_keeps_no_claim(nodes: list[ClusterNode]) -> None:
    error = error_of(lambda: add(nodes[0], "vm-a", ipam={**IPAM, "scope": "node"}))
    assert error.code == Code.INVALID_CONFIG
    assert '"scope": "cluster"' in error.message


def test_a_definition_of_nv_ipam_keeps_no_claim(nodes: list[ClusterNode]) -> None:
    error = error_of(lambda: add(nodes[0], "vm-a", ipam={"type": "nv-ipam", "poolName": "pool1"}))
    assert error.code == Code.INVALID_CONFIG
    assert '"allowPersistentIPs"' in error.message


def test_a_full_quota_keeps_no_pod_from_the_address_of_its_claim(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    """Kubernetes counts what a namespace has before it looks whether the object is there."""
    a, b = nodes
    given = add(a, "vm-a")
    delete(a, "vm-a")
    let_go(a)

    def over_quota(verb: str, kind: str, name: str) -> None:
        if (verb, kind) == ("create", "AddressReservation"):
            raise Refused(f"create {kind} {name}: 403 exceeded quota")

    b.api.faults = over_quota
    assert add(b, "vm-b") == given


def test_a_reservation_of_another_that_has_the_name_serves_no_claim(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    """The controller would free the address, as that reservation does not name the claim."""
    add(nodes[0], "vm-a")
    (made,) = server.look_at_all(AddressReservation).items
    delete(nodes[0], "vm-a")
    let_go(nodes[0])
    owner = replace(made.spec.owner, kind="StatefulSet", name="web")
    server.put(replace(made, spec=replace(made.spec, owner=owner)))
    error = error_of(lambda: add(nodes[1], "vm-b"))
    assert error.code == Code.TRY_AGAIN
    assert "it is not for IPAMClaim ns/vm: delete it" in error.message


def test_a_static_pod_is_known_by_its_copy(server: FakeApi, nodes: list[ClusterNode]) -> None:
    """Its object on the API server has a uid of its own."""
    plain = pod("static", "n1")
    annotations = plain.metadata.annotations | {"kubernetes.io/config.mirror": "hash"}
    server.put(replace(plain, metadata=replace(plain.metadata, annotations=annotations)))
    assert add(nodes[0], "static", uid="of-the-file")


def life(a: ClusterNode, b: ClusterNode, moved: list[str]) -> None:
    """Pods of the claim on one node, on the other, and on the first again."""
    for node, name in ((a, "vm-a"), (b, "vm-b"), (a, "vm-c")):
        moved.extend(add(node, name))
        node.steps(1)
        delete(node, name)
        node.steps(3, 3.0)


def test_a_kill_at_any_boundary_neither_loses_nor_doubles_the_address(memory_path: Path) -> None:
    def cluster(name: str) -> tuple[FakeApi, ClusterNode, ClusterNode]:
        server = FakeApi()
        put_pool(server, size=1)
        server.put(claim())
        for each in ("vm-a", "vm-b", "vm-c"):
            server.put(pod(each))
        a = ClusterNode(server, memory_path / f"{name}-a")
        return server, a, ClusterNode(server, memory_path / f"{name}-b", "node-b", clock=a.clock)

    _, a, b = cluster("count")
    count = Kill()
    armed(a, count)
    life(a, b, [])
    assert count.count > 30
    for at in range(1, count.count + 1):
        server, a, b = cluster(str(at))
        moved: list[str] = []
        armed(a, Kill(at))
        with suppress(Killed, CNIError):
            life(a, b, moved)
        disarmed(a, "")
        for node in (a, b):
            audit(server, [a, b])
            for name in ("vm-a", "vm-b", "vm-c"):
                delete(node, name)
            node.steps(4, 30.0)
        (last,) = add(b, "vm-b")
        assert not moved or set(moved) == {last}
        assert status(server).ips == (f"{last}/24",)
        assert len(blocks(server)) == 1
        audit(server, [a, b])
