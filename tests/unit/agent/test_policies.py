"""Only a denied attachment is counted, by key and rule, and gets an event on its pod."""

from pathlib import Path

import pytest

from agent import policies as agent_policies
from agent.observe.metrics import Metrics
from agent.policies import DENIED, OTHER, AgentPolicies
from base.paths import Paths
from cni.spec.errors import CNIError, Code
from cni.spec.request import Request
from policy import allowance
from policy.allowance import NotAllowed
from policy.rules import Policy
from tests.fake_api import FakeApi
from tests.unit.agent.test_policy_follower import following
from tests.unit.policy.test_cluster import POD, RULE, policies
from tests.waiting import until

ARGS = "IgnoreUnknown=1;K8S_POD_NAMESPACE=team-a;K8S_POD_NAME=p;K8S_POD_UID=u"
ADD = Request(command="ADD", args=ARGS)


def denial(key: str = "pkey", *rules: str) -> CNIError:
    return NotAllowed(f'"{key}": 7 is not allowed', key, "7", rules)


@pytest.fixture
def counted() -> AgentPolicies:
    return AgentPolicies(Paths(), Policy)


def test_a_denial_is_counted(counted: AgentPolicies) -> None:
    counted.failed(ADD, denial("pkey", "teams/a", "b"))
    counted.failed(ADD, denial("pkey", "teams/a", "b"))
    counted.failed(ADD, CNIError(Code.NOT_ALLOWED, "a range of another network"))
    assert counted.denials() == {("pkey", "teams/a,b"): 2, (OTHER, OTHER): 1}
    metrics = Metrics(plugins=(), usage=tuple, attachments=dict)
    metrics.add(counted.families)
    text = metrics.exposition().decode()
    assert 'podfabric_policy_denied_total{key="pkey",rule="teams/a,b"} 2.0' in text


def test_other_errors_and_other_verbs_are_no_denials(counted: AgentPolicies) -> None:
    counted.failed(ADD, CNIError(Code.TRY_AGAIN, "later"))
    for verb in ("DEL", "CHECK", "GC", "STATUS"):
        counted.failed(Request(command=verb, args=ARGS), denial())
    assert not counted.denials()


@pytest.mark.parametrize(
    ("key", "label"),
    [
        ("ipam.ranges[0][12].subnet", "ipam.ranges.subnet"),
        ("runtimeConfig.infinibandGUID", "runtimeConfig.infinibandGUID"),
        ("ippool/secret", OTHER),
        ("pkey of 0000:3b:00.1", OTHER),
        ("k" * 65, OTHER),
    ],
)
def test_a_label_has_no_index_and_names_no_pool_or_device(
    counted: AgentPolicies, key: str, label: str
) -> None:
    counted.failed(ADD, denial(key, "r"))
    assert counted.denials() == {(label, "r"): 1}


def test_series_do_not_grow_without_end(
    counted: AgentPolicies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_policies, "MOST", 3)
    for number in range(9):
        counted.failed(ADD, denial("key", f"rule-{number}"))
    assert len(counted.denials()) == 4
    assert counted.denials()[OTHER, OTHER] == 6


def test_the_event_of_a_denial_names_key_value_and_rule_once_for_each_text(
    server: FakeApi, tmp_path: Path
) -> None:
    with following(server, tmp_path) as node:
        agents = AgentPolicies(Paths(), Policy)
        agents._follower = node.follower

        def ask(pkey: int, request: Request = ADD) -> None:
            allowed = allowance.of_pod(Policy(rules=policies(RULE).rules), POD)
            with pytest.raises(NotAllowed) as denied:
                allowed.using("pkeys", pkey, "pkey", f"{pkey:#06x}")
            agents.failed(request, denied.value)

        for pkey in (0x8002, 0x8002, 0x8003):
            ask(pkey)
        ask(0x8004, Request(command="ADD", args="K8S_POD_NAME"))
        until(lambda: len(server.events) == 2, what="events")
    for event, value in zip(server.events, ("0x8002", "0x8003"), strict=True):
        assert (event.reason, event.regarding["kind"]) == (DENIED, "Pod")
        assert (event.regarding["namespace"], event.regarding["name"]) == ("team-a", "p")
        for word in ("pkey", value, "teams/one"):
            assert word in event.message


@pytest.fixture
def server() -> FakeApi:
    return FakeApi()
