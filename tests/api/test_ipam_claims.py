"""IPAMClaims on a real API server, with the rights that the chart gives."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from cni.spec.errors import Code
from ipam.cluster.api import Refused
from ipam.cluster.controller.claim_ends import LOOK_EVERY, ClaimEnds
from ipam.cluster.controller.reservations import reserve
from ipam.cluster.controller.steps import Steps
from ipam.cluster.ipam_claims import ANNOTATION, IPAMClaim
from ipam.cluster.kubernetes_api import KubernetesApi
from ipam.cluster.names import pool_name
from ipam.cluster.objects import (
    AddressBlock,
    AddressPool,
    AddressReservation,
    Meta,
    PoolSpec,
    PoolStatus,
)
from ipam.cluster.sticky import of_claim
from ipam.cluster.wants import NamedClaim
from tests.api.server import ApiServer, name
from tests.api.test_nodes import RealNode
from tests.ipam_claims import KIND, claim, delete, selection
from tests.unit.ipam.calls import error_of
from tests.unit.ipam.cluster.contract import reservation
from tests.unit.ipam.cluster.nodes import READY
from tests.waiting import until
from tools import manifests

RANGE = "10.79.0.0/26"
IPAM: dict[str, object] = {"range": RANGE, "network_name": "claimed"}
POOL = pool_name("claimed", RANGE)
PERSISTENT = {"allowPersistentIPs": True}
CLAIMS = "/apis/k8s.cni.cncf.io/v1alpha1/ipamclaims"
PODS = "/api/v1/namespaces/ns/pods"
POLICY = "podfabric-claimed-reservations"


@pytest.fixture
def rights(server: ApiServer, node_a: KubernetesApi) -> Iterator[None]:
    """What the chart gives agents with `ipam.ipamClaims`."""
    role = ("--no-hooks", "-s", "templates/cluster-addresses/agent.yaml")
    with_claims = manifests.template("--set", "ipam.ipamClaims=true", *role)
    server.kubectl("apply", "-f", "-", stdin=with_claims)
    until(lambda: _is_in_force(server, node_a), what=f"policy {POLICY}", pause=0.2)
    yield
    server.kubectl("delete", "addressreservations", "--all", "--all-namespaces")
    for kind in ("validatingadmissionpolicybinding", "validatingadmissionpolicy"):
        server.kubectl("delete", kind, POLICY)
    server.kubectl("apply", "-f", "-", stdin=manifests.template(*role))


def _is_in_force(server: ApiServer, node: KubernetesApi) -> bool:
    try:
        made = node.create(reservation())
    except Refused as error:
        return "for an IPAMClaim only" in str(error)
    server.admin.delete(made)
    return False


@pytest.fixture
def kind(server: ApiServer) -> Iterator[None]:
    """The kind, a namespace and its pods' account."""
    server.make("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", KIND)
    server.kubectl(
        "wait", "--for=condition=Established", "--timeout=120s", "crd/ipamclaims.k8s.cni.cncf.io"
    )
    until(lambda: server.send("GET", CLAIMS)[0] == 200, what="kind IPAMClaim")
    server.send("POST", "/api/v1/namespaces", {"metadata": {"name": "ns"}})
    accounts = "/api/v1/namespaces/ns/serviceaccounts"
    server.send("POST", accounts, {"metadata": {"name": "default"}})
    yield
    server.kubectl("delete", "crd", "ipamclaims.k8s.cni.cncf.io")


@pytest.fixture
def pool(server: ApiServer) -> Iterator[AddressPool]:
    """A pool of blocks of one address, as the controller leaves it."""
    spec = PoolSpec(range=RANGE, network_name="claimed", block_size=1)
    made = server.admin.create(AddressPool(metadata=Meta(name=POOL), spec=spec))
    ready = replace(READY, last_transition_time="2026-01-01T00:00:00Z")
    status = PoolStatus(space="claimed", block_size=1, conditions=(ready,))
    yield server.admin.update_status(replace(made, status=status))
    for block in server.admin.list(AddressBlock, {"spec.pool": POOL}).items:
        server.admin.delete(block)
    server.admin.delete(server.admin.get(AddressPool, POOL))


def put_pod(server: ApiServer, pod: str, named: str = "vm") -> None:
    """A pod that names the claim."""
    annotations = {ANNOTATION: selection(**{"ipam-claim-reference": named})}
    spec = {"containers": [{"name": "vm", "image": "vm"}]}
    server.make(PODS, {"metadata": {"name": pod, "annotations": annotations}, "spec": spec})


@pytest.mark.usefixtures("rights", "kind", "pool")
def test_pods_of_a_claim_have_its_address_until_it_is_deleted(
    server: ApiServer, tmp_path: Path
) -> None:
    for pod in ("vm-a", "vm-b"):
        put_pod(server, pod)
    server.admin.create(claim())
    one, two = (RealNode(server, tmp_path / each, each) for each in (name("one"), name("two")))
    add = partial(RealNode.add, ipam=IPAM, ifname="net1", config=PERSISTENT)
    given = add(one, "vm-a")
    status = server.admin.get(IPAMClaim, "vm", "ns").status
    assert (status.ips, status.owner_pod) == ((f"{given[0]}/26",), "vm-a")
    refused = error_of(lambda: add(two, "vm-b"))
    assert refused.code == Code.TRY_AGAIN
    assert f"IPAMClaim ns/vm, and node {one.name} still has it" in refused.message
    delete(one, "vm-a")
    one.steps(3, 3.0)
    assert add(two, "vm-b") == given
    assert server.admin.get(IPAMClaim, "vm", "ns").status.owner_pod == "vm-b"
    delete(two, "vm-b")
    two.steps(3, 3.0)

    now = [0.0]
    ends = ClaimEnds(server.admin, lambda: now[0])

    def collect() -> None:
        now[0] += LOOK_EVERY
        steps = Steps()
        ends.step(server.admin.list(AddressReservation, namespace="ns").items, steps)
        blocks = server.admin.list(AddressBlock, {"spec.pool": POOL}).items
        reserve(
            server.admin,
            server.admin.list(AddressReservation, namespace="ns").items,
            blocks,
            steps,
        )
        assert steps.taken_errors() == []

    collect()
    (kept,) = server.admin.list(AddressReservation, namespace="ns").items
    assert kept.status.addresses == (given[0],)
    server.admin.delete(server.admin.get(IPAMClaim, "vm", "ns"))
    collect()
    assert server.admin.list(AddressReservation, namespace="ns").items == ()
    assert server.admin.list(AddressBlock, {"spec.pool": POOL}).items == ()
    for pod in ("vm-a", "vm-b"):
        server.send("DELETE", f"{PODS}/{pod}?gracePeriodSeconds=0")


@pytest.mark.usefixtures("rights", "kind", "pool")
def test_a_pod_cannot_name_a_claim_of_another_namespace(server: ApiServer, tmp_path: Path) -> None:
    server.send("POST", "/api/v1/namespaces", {"metadata": {"name": "theirs"}})
    theirs = claim()
    theirs = server.admin.create(
        replace(theirs, metadata=replace(theirs.metadata, namespace="theirs"))
    )
    put_pod(server, "thief", "../../theirs/ipamclaims/vm")
    node = RealNode(server, tmp_path / "thief", name("thief"))
    error = error_of(lambda: node.add("thief", IPAM, ifname="net1", config=PERSISTENT))
    assert error.code == Code.TRY_AGAIN
    assert "no object can have that name" in error.message
    assert server.admin.get(IPAMClaim, "vm", "theirs") == theirs
    server.send("DELETE", f"{PODS}/thief?gracePeriodSeconds=0")
    server.kubectl("delete", "ipamclaim", "-n", "theirs", "vm")


@pytest.mark.usefixtures("rights", "kind", "pool")
def test_a_full_quota_keeps_no_pod_from_the_address_of_its_claim(
    server: ApiServer, tmp_path: Path
) -> None:
    """The server looks at the quota first, and then whether the object is there."""
    server.admin.create(claim("full"))
    for pod in ("vm-q", "vm-r"):
        put_pod(server, pod, "full")
    one, two = (RealNode(server, tmp_path / each, each) for each in (name("one"), name("two")))
    add = partial(RealNode.add, ipam=IPAM, ifname="net1", config=PERSISTENT)
    given = add(one, "vm-q")
    delete(one, "vm-q")
    one.steps(3, 3.0)
    quotas = "/api/v1/namespaces/ns/resourcequotas"
    hard = {"count/addressreservations.ipam.podfabric.io": "1"}
    made = server.make(quotas, {"metadata": {"name": "full"}, "spec": {"hard": hard}})
    made["status"] = {"hard": hard, "used": hard}  # no controller runs here to count
    assert server.send("PUT", f"{quotas}/full/status", made)[0] == 200
    other = reservation()
    other = replace(other, metadata=replace(other.metadata, namespace="ns"))
    until(lambda: _is_over_quota(server, other), what="the quota", pause=0.2)
    assert add(two, "vm-r") == given
    server.send("DELETE", f"{quotas}/full")
    for pod in ("vm-q", "vm-r"):
        server.send("DELETE", f"{PODS}/{pod}?gracePeriodSeconds=0")


def _is_over_quota(server: ApiServer, new: AddressReservation) -> bool:
    try:
        server.admin.delete(server.admin.create(new))
    except Refused as error:
        return "exceeded quota" in str(error)
    return False


@pytest.mark.usefixtures("rights")
def test_without_the_kind_the_error_says_so(server: ApiServer, tmp_path: Path) -> None:
    server.send("POST", "/api/v1/namespaces", {"metadata": {"name": "ns"}})
    accounts = "/api/v1/namespaces/ns/serviceaccounts"
    server.send("POST", accounts, {"metadata": {"name": "default"}})
    put_pod(server, "vm-c")
    node = RealNode(server, tmp_path / "kindless", name("kindless"))
    error = error_of(lambda: node.add("vm-c", IPAM, ifname="net1", config=PERSISTENT))
    assert error.code == Code.TRY_AGAIN
    assert "kubectl get crd ipamclaims.k8s.cni.cncf.io" in error.message
    server.send("DELETE", f"{PODS}/vm-c?gracePeriodSeconds=0")


@pytest.mark.usefixtures("rights")
def test_an_agent_reserves_for_a_claim_only(node_a: KubernetesApi) -> None:
    made = of_claim(NamedClaim("default", "vm", "uid-1"), "pool")
    with pytest.raises(Refused, match="for an IPAMClaim only"):
        node_a.create(reservation())
    node_a.create(made)
    (link,) = made.metadata.owner_references
    for wrong in (
        replace(made.metadata, name="trainer"),  # a name that a user may want
        replace(made.metadata, finalizers=("example.com/never",)),
        replace(made.metadata, owner_references=({**link, "blockOwnerDeletion": True},)),
    ):
        with pytest.raises(Refused, match="for an IPAMClaim only"):
            node_a.create(replace(made, metadata=wrong))
    with pytest.raises(Refused, match="cannot delete"):
        node_a.delete(node_a.create(of_claim(NamedClaim("default", "vm", "uid-2"), "pool")))
