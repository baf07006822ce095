"""A denied attachment is counted by key and rule, and its pod is told; nothing else is."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from agent import policies as agent_policies
from agent.metrics import Metrics
from agent.policies import DENIED, OTHER, AgentPolicies
from base.paths import Paths
from cni.policy import allowance
from cni.policy.allowance import NotAllowed
from cni.policy.rules import Policy
from cni.spec.errors import CNIError, Code
from cni.spec.request import Request
from cni.spec.result import Result
from tests.fake_api import FakeApi
from tests.unit.agent.test_policy_follower import following
from tests.unit.policy.test_cluster import POD, RULE, policies
from tests.waiting import until

ARGS = "IgnoreUnknown=1;K8S_POD_NAMESPACE=team-a;K8S_POD_NAME=p;K8S_POD_UID=u"
ADD = Request(command="ADD", args=ARGS)


class Failing:
    """A plugin whose ADD does what `act` does."""

    versions = ("1.1.0",)

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def add(self, request: Request) -> Result:
        self._act()
        return Result()

    def other(self, request: Request) -> None:
        self._act()

    delete = check = gc = status = other


def deny(key: str = "pkey", *rules: str) -> Callable[[], object]:
    def act() -> object:
        raise NotAllowed(f'"{key}": 7 is not allowed', key, "7", rules)

    return act


def add(counted: AgentPolicies, act: Callable[[], object], request: Request = ADD) -> int:
    """The error code of an ADD, 0 for none."""
    try:
        counted.watched(Failing(act)).add(request)
    except CNIError as error:
        return error.code
    return 0


@pytest.fixture
def counted() -> AgentPolicies:
    return AgentPolicies(Paths(), Policy)


def test_a_denial_is_counted_and_stays_an_error(counted: AgentPolicies) -> None:
    assert add(counted, deny("pkey", "teams/a", "b")) == Code.NOT_ALLOWED
    assert add(counted, deny("pkey", "teams/a", "b")) == Code.NOT_ALLOWED

    def by_no_rule() -> object:
        raise CNIError(Code.NOT_ALLOWED, "a range of another network")

    add(counted, by_no_rule)
    assert counted.denials() == {("pkey", "teams/a,b"): 2, (OTHER, OTHER): 1}
    metrics = Metrics(plugins=(), usage=tuple, attachments=dict)
    metrics.add(counted.families)
    text = metrics.exposition().decode()
    assert 'podfabric_policy_denied_total{key="pkey",rule="teams/a,b"} 2.0' in text


def test_other_errors_and_other_verbs_are_no_denials(counted: AgentPolicies) -> None:
    def later() -> object:
        raise CNIError(Code.TRY_AGAIN, "later")

    assert add(counted, later) == Code.TRY_AGAIN
    assert add(counted, lambda: None) == 0
    watched = counted.watched(Failing(deny()))
    assert watched.versions == ("1.1.0",)
    for verb in (watched.delete, watched.check, watched.gc, watched.status):
        with pytest.raises(NotAllowed):
            verb(ADD)
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
    add(counted, deny(key, "r"))
    assert counted.denials() == {(label, "r"): 1}


def test_series_do_not_grow_without_end(
    counted: AgentPolicies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_policies, "MOST", 3)
    for number in range(9):
        add(counted, deny("key", f"rule-{number}"))
    assert len(counted.denials()) == 4
    assert counted.denials()[OTHER, OTHER] == 6


def test_the_event_of_a_denial_names_key_value_and_rule_once_for_each_text(
    server: FakeApi, tmp_path: Path
) -> None:
    with following(server, tmp_path) as node:
        agents = AgentPolicies(Paths(), Policy)
        agents._follower = node.follower

        def ask(pkey: int) -> None:
            allowed = allowance.of_pod(Policy(rules=policies(RULE).rules), POD)
            allowed.using("pkeys", pkey, "pkey", f"{pkey:#06x}")

        for pkey in (0x8002, 0x8002, 0x8003):
            assert add(agents, partial(ask, pkey)) == Code.NOT_ALLOWED
        unnamed = Request(command="ADD", args="K8S_POD_NAME")
        assert add(agents, partial(ask, 0x8004), unnamed) == Code.NOT_ALLOWED
        until(lambda: len(server.events) == 2, what="events")
    for event, value in zip(server.events, ("0x8002", "0x8003"), strict=True):
        assert (event.reason, event.regarding["kind"]) == (DENIED, "Pod")
        assert (event.regarding["namespace"], event.regarding["name"]) == ("team-a", "p")
        for word in ("pkey", value, "teams/one"):
            assert word in event.message


@pytest.fixture
def server() -> FakeApi:
    return FakeApi()
