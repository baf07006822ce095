"""Rules for the addresses of a namespace: types, names, ranges, and how many."""

import threading
from typing import Any

import pytest

from cni.spec.errors import CNIError, Code
from policy.allowance import NotAllowed
from policy.document import rules_of
from policy.rules import Policy
from tests.unit.ipam.calls import Calls, error_of

POOL = {"type": "podfabric-ipam", "range": "10.1.0.0/24"}
USE = {"ipamTypes": ["podfabric-ipam"], "ranges": ["10.1.0.0/16"]}


def policy(use: dict[str, Any], **options: Any) -> Policy:  # noqa: ANN401
    rule = {"name": "r", "subjects": [{"namespaces": ["ns"]}], "use": use, **options}
    return Policy(rules=rules_of([rule], "rules"))


def refused(node: Calls, ipam: dict[str, Any], **how: Any) -> NotAllowed:  # noqa: ANN401
    error = error_of(lambda: node.add(ipam, **how))
    assert isinstance(error, NotAllowed), error
    assert node.held() == {}
    return error


@pytest.mark.parametrize(
    ("ipam", "key"),
    [
        ({"type": "whereabouts", "range": "10.1.0.0/24"}, "ipam.type"),
        ({**POOL, "range": "10.2.0.0/24"}, "ipam.range"),
        ({**POOL, "range": "10.1.0.0/15"}, "ipam.range"),
        ({**POOL, "ipRanges": [{"range": "10.2.0.0/24"}]}, "ipam.ipRanges[0]"),
        ({**POOL, "ranges": [[{"subnet": "fd00::/64"}]]}, "ipam.ranges[0][0]"),
        ({"type": "podfabric-ipam", "addresses": [{"address": "10.2.0.1/24"}]}, "ipam.addresses"),
        ({**POOL, "network_name": "x"}, "ipam.network_name"),
        ({**POOL, "scope": "node"}, "ipam.scope"),
    ],
)
def test_what_no_rule_lists_is_refused_by_its_key(
    node: Calls, ipam: dict[str, Any], key: str
) -> None:
    node.policy = policy(USE)
    error = refused(node, ipam, pod="p")
    assert (error.code, error.key.startswith(key)) == (121, True), error


def test_what_an_exclusion_leaves_out_is_not_asked_for(node: Calls) -> None:
    node.policy = policy(USE)
    wide = {**POOL, "range": "10.0.0.0/15", "exclude": ["10.0.0.0/16"]}
    assert node.addresses(wide, pod="p") == ["10.1.0.0/15"]


@pytest.mark.parametrize(
    "how",
    [
        {"config": {"runtimeConfig": {"ips": ["10.2.0.5"]}}},
        {"config": {"args": {"cni": {"ips": ["10.2.0.5"]}}}},
        {"args": "IP=10.2.0.5"},
        {"config": {"runtimeConfig": {"ipRanges": [[{"subnet": "10.2.0.0/24"}]]}}},
    ],
    ids=str,
)
def test_what_the_runtime_passes_counts_as_the_definition_does(
    node: Calls, how: dict[str, Any]
) -> None:
    node.policy = policy(USE)
    wide = {**POOL, "range": "10.2.0.0/16"} if "ipRanges" not in str(how) else POOL
    error = refused(node, wide, pod="p", **how)
    assert "10.2.0" in error.value


def test_names_and_counts(node: Calls) -> None:
    node.policy = policy({**USE, "networkNames": ["a-*"], "addressesPerAttachment": 1})
    assert node.addresses({**POOL, "network_name": "a-1"}, pod="p") == ["10.1.0.1/24"]
    node.delete(POOL)
    error = refused(node, {**POOL, "ipRanges": [{"range": "10.1.1.0/24"}]}, pod="p")
    assert (error.key, error.value) == ("ipam", "2 addresses")


def test_a_namespace_has_at_most_its_quota_on_this_node(node: Calls) -> None:
    node.policy = policy({**USE, "addressesPerNamespace": 2})
    for number in (1, 2):
        node.add(POOL, f"c{number}", pod=f"p{number}", uid=f"u{number}")
    error = error_of(lambda: node.add(POOL, "c3", pod="p3", uid="u3"))
    assert isinstance(error, NotAllowed)
    assert (error.code, error.key, error.value) == (Code.NOT_ALLOWED, "addressesPerNamespace", "3")
    assert error.rules == ("r",)
    assert sorted(node.held().values()) == ["c1", "c2"]
    node.add(POOL, "c1-again", pod="p1", uid="u1")  # replaces what its former sandbox had
    node.delete(POOL, "c2")
    node.add(POOL, "c3", pod="p3", uid="u3")
    assert sorted(node.held().values()) == ["c1-again", "c3"]


def test_a_pod_has_at_most_its_quota_on_all_its_interfaces(node: Calls) -> None:
    node.policy = policy({**USE, "addressesPerPod": 2})
    pod = {"pod": "p1", "uid": "u1"}
    for number in (1, 2):
        node.add(POOL, "c1", **pod, ifname=f"net{number}")  # type: ignore[arg-type]
    third = lambda: node.add(POOL, "c1", **pod, ifname="net3")  # type: ignore[arg-type]  # noqa: E731
    error = error_of(third)
    assert isinstance(error, NotAllowed)
    assert (error.code, error.key, error.value) == (Code.NOT_ALLOWED, "addressesPerPod", "3")
    assert error.rules == ("r",)
    node.add(POOL, "c9", pod="p9", uid="u9")  # of another pod
    node.add(POOL, "c1-again", **pod, ifname="net1")  # type: ignore[arg-type]
    assert sorted(node.held().values()) == ["c1", "c1-again", "c9"]
    node.delete(POOL, "c1", ifname="net2")
    node.add(POOL, "c1-again", **pod, ifname="net3")  # type: ignore[arg-type]


def test_a_pod_of_the_same_name_made_again_has_a_quota_of_its_own(node: Calls) -> None:
    node.policy = policy({**USE, "addressesPerPod": 1})
    node.add(POOL, "c1", pod="p1", uid="u1")
    node.add(POOL, "c2", pod="p1", uid="u2")
    node.boot = "22222222-2222-2222-2222-222222222222"
    node.add(POOL, "c3", pod="p1", uid="u1", ifname="net2")


def test_attachments_that_come_at_once_share_one_quota(node: Calls) -> None:
    node.policy = policy({**USE, "addressesPerNamespace": 5})
    answers: list[int] = []

    def add(number: int) -> None:
        try:
            node.add(POOL, f"c{number}", pod=f"p{number}", uid=f"u{number}")
            answers.append(0)
        except CNIError as error:
            answers.append(error.code)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [0] * 5 + [Code.NOT_ALLOWED] * 7
    assert len(node.held()) == 5


def test_private_range_that_another_network_uses_needs_a_rule(node: Calls) -> None:
    link = {"master": "eth0"}
    evil = {**POOL, "network_name": "evil"}
    node.policy = policy(USE | {"networkNames": ["evil"]})
    node.add(POOL, "c1", network="theirs", pod="victim", config=link)
    error = error_of(lambda: node.add(evil, "c2", network="mine", pod="p", config=link))
    assert error.code == Code.NOT_ALLOWED
    assert '"set.private_ranges"' in error.message
    node.policy = policy(USE | {"networkNames": ["evil"]}, set={"private_ranges": [True]})
    assert node.addresses(evil, "c2", network="mine", pod="p", config=link) == ["10.1.0.2/24"]
