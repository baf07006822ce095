"""Rules with real children: the P_Key that a rule puts in, and those that it does not list."""

from typing import Any

from cni.policy.document import rules_of
from cni.policy.rules import Policy
from tests.kernel.pods import Node, ipam, link_in

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


def test_pod_that_was_attached_before_a_rule_is_checked_and_removed(
    node: Node, pods: list[str]
) -> None:
    config: dict[str, Any] = {"args": ARGS, "pkey": "0x8002", "ipam": ipam("10.9.0.0/24")}
    added = node.add("c1", pods[0], **config)
    node.policy = rules()
    assert node.call("CHECK", "c1", pods[0], previous=added, **config).exit_code == 0
    node.delete("c1", pods[0], **config)
    assert node.leftovers() == []
