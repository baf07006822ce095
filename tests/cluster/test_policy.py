"""Two tenants with their own rules: access to the other's devices is refused, with the reason."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import yaml

from agent.policies import DENIED
from tests.cluster import images
from tests.cluster.cluster import PATIENCE, Cluster, Document, Namespace, namespaces
from tests.cluster.configurations import ipoib
from tests.cluster.installation import (
    HCA,
    await_nothing_left,
    configured,
    with_vfs,
)
from tests.cluster.seen import pings
from tests.runtime import CHECKOUT
from tests.waiting import until

EXAMPLE = CHECKOUT / "netattach-examples/policy/partition-per-namespace.yaml"
POLICY = "tenants"
SUBNETS = ("10.61.0.0/16", "10.62.0.0/16")
PKEYS = ("0x8001", "0x8002")
VFS = ("rdma/vf-a", "rdma/vf-b")
GUIDS = ("02:00:00:00:00:00:00", "02:00:00:00:00:00:01")
"""The first seven bytes of each tenant's."""

Tenants = tuple[Namespace, Namespace]


def rule(tenant: Namespace, number: int, **changes: object) -> Document:
    """All devices that a tenant may use: its own partition, VF, GUIDs and addresses."""
    guids = f"{GUIDS[number]}:00-{GUIDS[number]}:ff"
    return {
        "name": tenant.name[-1],
        "subjects": [{"namespaces": [tenant.name]}],
        "use": {
            "pools": [HCA, VFS[number]],
            "pkeys": [PKEYS[number]],
            "vlans": [0],
            "guids": [guids],
            "ipamTypes": ["podfabric-ipam"],
            "ranges": [SUBNETS[number]],
            **changes,
        },
        "set": {"scope": ["node"]},
    }


def put(cluster: Cluster, *rules: Document) -> None:
    """Create the policy, or change it to have these rules."""
    cluster.apply(
        {
            "apiVersion": "fabric.podfabric.io/v1alpha1",
            "kind": "FabricPolicy",
            "metadata": {"name": POLICY},
            "spec": {"rules": list(rules)},
        }
    )


@contextmanager
def policy(cluster: Cluster, *rules: Document) -> Iterator[None]:
    """A policy for the block, which the node has applied."""
    put(cluster, *rules)
    await_in_force(cluster, *rules)
    try:
        yield
    finally:
        kinds = cluster.objects.resources.get(
            api_version="fabric.podfabric.io/v1alpha1", kind="FabricPolicy"
        )
        kinds.delete(name=POLICY)
        await_in_force(cluster)


def await_in_force(cluster: Cluster, *rules: Document) -> None:
    """Wait until the agent has recorded that it uses exactly these rules."""

    def written() -> list[Document]:
        path = "/var/lib/podfabric/cluster_policies.json"
        policies = json.loads(cluster.node.run(f"cat {path}"))["policies"]["policies"]
        return [one for each in policies for one in each["rules"]]

    until(lambda: written() == list(rules), PATIENCE, "policy in force", pause=0.5)


def refused(tenant: Namespace, pod: str, *words: str) -> None:
    """Wait until an event of the pod reports a denial by the policy, with these words."""

    def told() -> bool:
        events = [each for each in tenant.events(pod) if each.startswith(DENIED)]
        return any(all(word in each for word in words) for each in events)

    try:
        until(told, PATIENCE, f"event with {words}", pause=1)
    except AssertionError as error:
        raise AssertionError(f"{error}: {tenant.events(pod)}") from None


@pytest.fixture
def tenants(cluster: Cluster) -> Iterator[Tenants]:
    """Two tenants, each with its own rules."""
    with (
        namespaces(cluster, ["tenant-a", "tenant-b"]) as (one, other),
        policy(cluster, rule(one, 0), rule(other, 1)),
    ):
        yield one, other
    await_nothing_left(cluster)


def test_tenants_reach_their_own_pods_and_not_the_partition_or_the_addresses_of_another(
    tenants: Tenants,
) -> None:
    one, other = tenants
    for tenant, subnet, pkey in zip(tenants, SUBNETS, PKEYS, strict=True):
        tenant.network("own", ipoib(subnet, pkey=pkey))
        for name in ("first", "second"):
            tenant.pod(name, networks="own", devices={HCA: 1})
    one.network("partition", ipoib(SUBNETS[0], pkey=PKEYS[1]))
    one.network("range", ipoib(SUBNETS[1], pkey=PKEYS[0]))
    one.network("silent", ipoib(SUBNETS[0]))  # on the parent's partition, which no tenant owns
    for name in ("partition", "range", "silent"):
        one.pod(name, networks=name, devices={HCA: 1})
    for tenant in tenants:
        tenant.running("first", "second")
        assert pings(tenant, "first", tenant.address("second"))
    assert not pings(one, "first", other.address("first"), tries=1)
    refused(one, "partition", "pkey", "0x8002", f"{POLICY}/a")
    refused(one, "range", "ipam.range", "10.62.0.", f"{POLICY}/a")
    refused(one, "silent", "pkey", f"{POLICY}/a")
    metrics = one.cluster.node.run("busybox wget -q -O - http://127.0.0.1:9810/metrics")
    assert f'podfabric_policy_denied_total{{key="pkey",rule="{POLICY}/a"}}' in metrics
    one.delete("first", "second", "partition", "range", "silent")
    other.delete("first", "second")


def test_tenants_of_the_example_with_a_partition_each_run_and_are_isolated(
    cluster: Cluster,
) -> None:
    objects = list(yaml.safe_load_all(EXAMPLE.read_text()))
    (rules,) = [each["spec"]["rules"] for each in objects if each["kind"] == "FabricPolicy"]
    with namespaces(cluster, ["team-a", "team-b"]) as (one, other), policy(cluster, *rules):
        for each in objects:
            if each["kind"] == "Pod":
                each["spec"]["terminationGracePeriodSeconds"] = 0
                each["spec"]["containers"][0]["image"] = images.WORKLOAD
            if "namespace" in each["metadata"]:
                cluster.apply(each, each["metadata"]["namespace"])
        for tenant in (one, other):
            tenant.running("worker-0")
        assert not pings(one, "worker-0", other.address("worker-0"), tries=1)
        own = ipoib("10.81.0.0/16", master="ib0", pkey=PKEYS[1])
        one.network("partition", own)
        one.pod("partition", networks="partition")
        refused(one, "partition", "pkey", PKEYS[1], f"{POLICY}/team-a")
        one.delete("worker-0", "partition")
        other.delete("worker-0")
    await_nothing_left(cluster)


@pytest.fixture
def vfs(cluster: Cluster) -> Iterator[None]:
    """A VF for each tenant, without an RDMA device."""
    with with_vfs(cluster, 2) as pf:
        pools = [
            {
                "name": name,
                "mode": "exclusive",
                "rdma": False,
                "selectors": {"pfNames": [f"{pf}#{number}"]},
            }
            for number, name in enumerate(VFS)
        ]
        with configured(cluster, {"pools": pools}, dict.fromkeys(VFS, 1)):
            yield


@pytest.mark.long
@pytest.mark.usefixtures("vfs")
def test_a_tenant_gets_its_own_vf_and_no_other_device_or_setting(tenants: Tenants) -> None:
    one, _ = tenants
    ipam = {"type": "podfabric-ipam", "range": SUBNETS[0]}
    one.network("own", {"type": "sriov", "ipam": ipam}, resource=VFS[0])
    one.pod("own", networks="own", devices={VFS[0]: 1})
    one.running("own")
    one.delete("own")
    tries: dict[str, tuple[str, dict[str, Any], str]] = {
        "theirs": (VFS[1], {}, "deviceID"),
        "guid": (VFS[0], {"guid": f"{GUIDS[1]}:07"}, "guid"),
        "trust": (VFS[0], {"trust": "on"}, "trust"),
        "whole": (VFS[0], {"pfOnly": True}, "pfOnly"),
        "vlan": (VFS[0], {"vlan": 7}, "vlan"),
    }
    for name, (resource, options, key) in tries.items():
        one.network(name, {"type": "sriov", "ipam": ipam, **options}, resource=resource)
        one.pod(name, networks=name, devices={resource: 1})
        refused(one, name, key, f"{POLICY}/a")
        one.delete(name)
