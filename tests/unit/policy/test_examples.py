"""The examples of policies: each tenant gets its own, and is refused what the other one has."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from base.pod import Pod
from cli.policy import WrittenDefinition, verdicts
from cni.ipoib import options
from cni.spec.config import decode
from cni.spec.request import Request
from policy.allowance import of_pod
from policy.document import rules_of
from policy.rules import Policy
from tests.runtime import CHECKOUT
from tests.unit.sriov.conftest import ethernet, infiniband
from tests.unit.sriov.node import Node
from tests.unit.sriov.test_permitted import claim

__all__ = ["ethernet", "infiniband"]  # the fixtures

FILES = sorted((CHECKOUT / "netattach-examples/policy").glob("*.yaml"))
TENANTS = ("team-a", "team-b")
OTHER = dict(zip(TENANTS, reversed(TENANTS), strict=True))
GUIDS = {"team-a": "02:00:00:00:00:0a:00:01", "team-b": "02:00:00:00:00:0b:00:01"}


def documents(name: str, kind: str) -> list[dict[str, Any]]:
    """The objects of one kind in an example."""
    text = (CHECKOUT / f"netattach-examples/policy/{name}.yaml").read_text()
    return [each for each in yaml.safe_load_all(text) if each["kind"] == kind]


def rules(name: str) -> list[dict[str, Any]]:
    (policy,) = documents(name, "FabricPolicy")
    found: list[dict[str, Any]] = policy["spec"]["rules"]
    return found


def configuration(name: str, tenant: str) -> dict[str, Any]:
    """The configuration of a tenant's definition."""
    (config,) = [
        json.loads(each["spec"]["config"])
        for each in documents(name, "NetworkAttachmentDefinition")
        if each["metadata"]["namespace"] == tenant
    ]
    return dict(config)


def key_refused(name: str, tenant: str, **changes: object) -> str:
    """The key for which a tenant's changed definition is refused; "" if it is allowed."""
    policy = Policy(rules=rules_of(rules(name), "rules", name))
    config = json.dumps(configuration(name, tenant) | changes)
    (verdict,) = verdicts([WrittenDefinition(tenant, "n", config)], policy, {})
    assert verdict.allowed or verdict.key, verdict.said
    return verdict.key


def test_there_are_examples() -> None:
    names = ["guids-per-namespace", "partition-per-namespace", "vlan-per-namespace"]
    assert [file.stem for file in FILES] == names
    listed = (CHECKOUT / "netattach-examples/README.md").read_text()
    assert all(f"`policy/{name}.yaml`" in listed for name in names)


@pytest.mark.parametrize("tenant", TENANTS)
@pytest.mark.parametrize("name", [file.stem for file in FILES])
def test_a_tenant_gets_its_own_and_not_the_addresses_of_the_other(name: str, tenant: str) -> None:
    assert key_refused(name, tenant) == ""
    theirs = configuration(name, OTHER[tenant])["ipam"]
    assert key_refused(name, tenant, ipam=theirs) == "ipam.range"
    assert key_refused(name, tenant, match_device=False) == "match_device"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.stem))
def test_pods_name_their_definition_and_request_the_device_of_the_rule(path: Path) -> None:
    for pod in documents(path.stem, "Pod"):
        tenant = pod["metadata"]["namespace"]
        asked = pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"]
        selected = json.loads(asked)[0]["name"] if "[" in asked else asked
        (own,) = [
            each["metadata"]
            for each in documents(path.stem, "NetworkAttachmentDefinition")
            if each["metadata"]["namespace"] == tenant
        ]
        assert selected == own["name"]
        (rule,) = [each for each in rules(path.stem) if each["name"] == tenant]
        (container,) = pod["spec"]["containers"]
        limits = container.get("resources", {}).get("limits", {})
        resource = own.get("annotations", {}).get("k8s.v1.cni.cncf.io/resourceName")
        assert list(limits) == ([resource] if resource else [])
        assert list(limits) == rule["use"].get("pools", [])


@pytest.mark.parametrize(("tenant", "pkey"), [("team-a", 0x8001), ("team-b", 0x8002)])
def test_a_child_is_in_the_partition_of_its_namespace(tenant: str, pkey: int) -> None:
    name = "partition-per-namespace"
    policy = Policy(rules=rules_of(rules(name), "rules", name))
    config = configuration(name, tenant)
    request = Request(command="ADD", network="n", config=decode(json.dumps(config).encode()))
    wanted = options.read(request)
    allowed = options.allowed(wanted, of_pod(policy, Pod(tenant, "worker-0")))
    fixed = allowed.filled(request.config.keys, ("pkey",))
    assert options.read(request.with_keys(fixed)).pkey == pkey
    assert key_refused(name, tenant, pkey=f"{pkey ^ 3:#06x}") == "pkey"


def on_a_device(name: str, tenant: str) -> dict[str, Any]:
    """The tenant's rule for every pod, on every device."""
    (rule,) = [each for each in rules(name) if each["name"] == tenant]
    return {"use": rule["use"] | {"devices": ["*"]}, "fixed": rule.get("fixed", {})}


@pytest.mark.root
@pytest.mark.parametrize(("tenant", "vlan"), [("team-a", 100), ("team-b", 200)])
def test_a_vf_is_in_the_vlan_of_its_namespace(ethernet: Node, tenant: str, vlan: int) -> None:
    name = "vlan-per-namespace"
    config = configuration(name, tenant)
    applied = claim(ethernet, on_a_device(name, tenant), **config).record.applied
    assert applied is not None and applied.vlan == vlan
    assert key_refused(name, tenant, vlan=300 - vlan) == "vlan"
    assert key_refused(name, tenant, vlan=0) == "vlan"


@pytest.mark.root
@pytest.mark.parametrize("tenant", TENANTS)
def test_a_vf_has_a_guid_of_its_namespace(infiniband: Node, tenant: str) -> None:
    name = "guids-per-namespace"
    config = configuration(name, tenant)
    own = {"runtimeConfig": {"infinibandGUID": GUIDS[tenant]}}
    applied = claim(infiniband, on_a_device(name, tenant), **config, **own).record.applied
    assert applied is not None and applied.port_guid == GUIDS[tenant]
    theirs = {"infinibandGUID": GUIDS[OTHER[tenant]]}
    assert key_refused(name, tenant, runtimeConfig=theirs) == "guid"
