"""Rules with real children: the P_Key that a rule puts in, and those that it does not list."""

import json
from typing import Any

import pytest
import yaml

from cni.policy.document import rules_of
from cni.policy.rules import Policy
from tests.kernel.pods import Node, ipam, link_in, link_names
from tests.runtime import CHECKOUT

EXAMPLE = CHECKOUT / "netattach-examples/policy/partition-per-namespace.yaml"
ARGS = "K8S_POD_NAMESPACE=team-a;K8S_POD_NAME=pod"
RULE = {
    "name": "a",
    "subjects": [{"namespaces": ["team-a"]}],
    "use": {
        "devices": [{"ifNames": ["ib0"]}],
        "pkeys": ["0x8001"],
        "ipamTypes": ["podfabric-ipam"],
        "ranges": ["10.9.0.0/16"],
    },
}


def rules(**more: Any) -> Policy:  # noqa: ANN401
    return Policy(rules=rules_of([RULE | more], "rules"))


def test_child_is_in_the_partition_that_the_rule_puts_in(node: Node, pods: list[str]) -> None:
    node.policy = rules(fixed={"pkey": "0x8001"})
    config: dict[str, Any] = {"args": ARGS, "ipam": ipam("10.9.0.0/24")}
    node.add("c1", pods[0], **config)
    link = link_in(pods[0])
    assert link is not None and link.pkey == 0x8001
    node.delete("c1", pods[0], **config)
    assert node.leftovers() == []


@pytest.mark.parametrize(("tenant", "pkey"), [("team-a", 0x8001), ("team-b", 0x8002)])
def test_children_of_the_example_are_in_the_partitions_of_their_namespaces(
    node: Node, pods: list[str], tenant: str, pkey: int
) -> None:
    objects = list(yaml.safe_load_all(EXAMPLE.read_text()))
    (policy,) = [each for each in objects if each["kind"] == "FabricPolicy"]
    node.policy = Policy(rules=rules_of(policy["spec"]["rules"], "rules"))
    (definition,) = [
        each
        for each in objects
        if each["kind"] == "NetworkAttachmentDefinition" and each["metadata"]["namespace"] == tenant
    ]
    config = json.loads(definition["spec"]["config"])
    config["args"] = f"K8S_POD_NAMESPACE={tenant};K8S_POD_NAME=worker-0"
    node.add("c1", pods[0], **config)
    link = link_in(pods[0])
    assert link is not None and link.pkey == pkey
    node.delete("c1", pods[0], **config)
    other = "team-b" if tenant == "team-a" else "team-a"
    config["args"] = config["args"].replace(tenant, other)
    assert node.refused("c1", pods[0], **config).document["code"] == 121  # the range of the other


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"pkey": "0x8002"}, ['"pkey": 0x8002', '(a) lists it in "use.pkeys"']),
        ({}, ['"pkey": 0xffff']),
        ({"pkey": "0x8001", "master": "ib1"}, ['"master": ib1', '"use.devices"']),
        ({"pkey": "0x8001", "ipam": ipam("10.8.0.0/24")}, ['"use.ranges"']),
    ],
    ids=str,
)
def test_what_the_rule_does_not_list_is_refused_and_makes_nothing(
    node: Node, pods: list[str], config: dict[str, Any], told: list[str]
) -> None:
    node.policy = rules()
    reply = node.refused("c1", pods[0], args=ARGS, **config)
    assert reply.document["code"] == 121
    for text in told:
        assert text in reply.text
    assert link_names(pods[0]) == {"lo"}


def test_pod_that_was_attached_before_a_rule_is_checked_and_removed(
    node: Node, pods: list[str]
) -> None:
    config: dict[str, Any] = {"args": ARGS, "pkey": "0x8002", "ipam": ipam("10.9.0.0/24")}
    added = node.add("c1", pods[0], **config)
    node.policy = rules()
    assert node.call("CHECK", "c1", pods[0], previous=added, **config).exit_code == 0
    node.delete("c1", pods[0], **config)
    assert node.leftovers() == []
