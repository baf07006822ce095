"""The examples whose addresses are the cluster's: what they promise of addresses holds."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from ipam.addresses import parse_interface
from ipam.cluster.documents import decode
from ipam.cluster.objects import KINDS, AddressPool, AddressReservation
from ipam.nv_ipam.pools import NvIPPool
from tests.runtime import CHECKOUT, definitions
from tests.unit.ipam.cluster.controller.cluster import Cluster
from tests.unit.ipam.cluster.nodes import ClusterNode
from tests.unit.ipam.cluster.test_sticky import let_go
from tests.unit.ipam.nv_ipam.nodes import World

EXAMPLES = CHECKOUT / "netattach-examples"
NAMESPACE = "ns"


def documents(name: str, kind: str = "") -> list[dict[str, Any]]:
    """The objects of an example, of one kind if it is given."""
    found = yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text())
    return [each for each in found if kind in ("", each["kind"])]


def applied(name: str) -> Cluster:
    """The cluster after `kubectl apply`, and a round of the controller."""
    cluster = Cluster()
    kinds = {kind.KIND: kind for kind in KINDS}
    for each in documents(name):
        if each["kind"] in kinds:
            kind = kinds[each["kind"]]
            meta = each["metadata"]
            meta |= {"namespace": NAMESPACE} if kind is AddressReservation else {}
            read = decode(json.dumps(each).encode(), kind)
            known = msgspec.to_builtins(read)["spec"]
            assert each["spec"].keys() <= known.keys(), "every field is one of the kind"
            cluster.api.create(read)
    for definition in definitions(EXAMPLES / f"{name}.yaml"):
        cluster.define(definition.config["ipam"], definition.name)
    cluster.round()
    for pool in cluster.api.look_at_all(AddressPool).items:
        assert cluster.condition("Ready", pool.metadata.name)[0] == "True"
    return cluster


def test_pods_of_the_example_of_sticky_addresses_keep_theirs(memory_path: Path) -> None:
    cluster = applied("sticky")
    (stateful_set,) = documents("sticky", "StatefulSet")
    name = stateful_set["metadata"]["name"]
    (definition,) = definitions(EXAMPLES / "sticky.yaml")
    annotations = stateful_set["spec"]["template"]["metadata"]["annotations"]
    assert annotations["k8s.v1.cni.cncf.io/networks"] == definition.name
    a, b = (
        ClusterNode(cluster.api, memory_path / each, f"node-{each}", clock=cluster.clock)
        for each in "ab"
    )
    pods = [f"{name}-{number}" for number in range(stateful_set["spec"]["replicas"])]
    given = {pod: a.add(pod, definition.config["ipam"]) for pod in pods}
    cluster.round()
    reservation = cluster.api.look(AddressReservation, "trainer", NAMESPACE)
    assert sorted(reservation.status.addresses) == sorted(each for (each,) in given.values())
    for pod in pods:
        a.delete(pod)
    let_go(a)
    assert {pod: b.add(pod, definition.config["ipam"]) for pod in pods} == given


def test_pods_of_the_example_of_nv_ipam_get_addresses_of_its_pool(
    memory_path: Path,
) -> None:
    world = World(memory_path)
    (document,) = documents("nv-ipam", "IPPool")
    pool = decode(json.dumps(document).encode(), NvIPPool)
    assert pool.metadata.namespace == "nvidia-network-operator"
    (definition,) = definitions(EXAMPLES / "nv-ipam.yaml")
    world.server.put(pool)
    node = world.node("a")
    world.settle()
    (address,) = node.add("nv-worker-0", definition.config["ipam"])
    assert parse_interface(address)[1] == parse_interface(pool.spec.subnet)[1]


@pytest.mark.parametrize("name", ["sticky"])
def test_pools_come_before_the_definitions_that_name_their_ranges(name: str) -> None:
    kinds = [each["kind"] for each in documents(name)]
    assert kinds.index("AddressPool") < kinds.index("NetworkAttachmentDefinition")
