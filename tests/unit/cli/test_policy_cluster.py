"""`podfabric policy check` without files reads definitions, policies and labels of the cluster."""

import json
from pathlib import Path

import pytest

from agent.policy_follower import FabricPolicy
from cli import policy as command
from ipam.cluster.api import NetworkDefinition
from tests.fake_api import FakeApi
from tests.unit.agent.test_policy_follower import namespace, policy
from tests.unit.cli.commands import Shell
from tests.unit.host import servers

GOLD = {
    "name": "gold",
    "subjects": [{"namespaceSelector": {"matchLabels": {"tier": "gold"}}}],
    "use": {"pkeys": ["0x8001"]},
}


def definition(of: str, name: str, pkey: str) -> NetworkDefinition:
    config = {"cniVersion": "1.0.0", "name": name, "type": "ipoib", "master": "ib0", "pkey": pkey}
    return NetworkDefinition(namespace=of, name=name, config=json.dumps(config))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    server = FakeApi()
    monkeypatch.setattr(command, "connect", lambda kubeconfig: server)
    for name in ("team-a", "team-b"):
        server.put(namespace(name, tier="gold"))
    server.put(namespace("other"))
    server.definitions += [
        definition("team-a", "own", "0x8001"),
        definition("team-b", "theirs", "0x8002"),
        definition("other", "free", "0x8002"),
        NetworkDefinition(namespace="team-a", name="of-the-node", config=""),
    ]
    return server


@pytest.fixture
def shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    return Shell(servers.dgx(tmp_path), monkeypatch, capsys)


def test_what_the_cluster_has_is_judged(server: FakeApi, shell: Shell) -> None:
    server.put(policy("tenants", GOLD))
    printed = shell("policy", "check", "-o", "json")
    assert printed.code == 1
    judged = {each["definition"]: each for each in printed.document()}
    assert {name: each["allowed"] for name, each in judged.items()} == {
        "team-a/own": True,
        "team-b/theirs": False,
        "other/free": True,
    }
    refused = judged["team-b/theirs"]
    assert (refused["key"], refused["value"]) == ("pkey", "0x8002")
    assert refused["rules"] == ["tenants/gold"]
    server.remove(FabricPolicy, "tenants")
    assert shell("policy", "check").code == 0


def test_a_policy_that_cannot_be_read_is_named(server: FakeApi, shell: Shell) -> None:
    server.put(policy("odd", {**GOLD, "use": {"pkeys": ["0x0"]}}))
    printed = shell("policy", "check")
    assert printed.code == 1
    assert "FabricPolicy odd: spec.rules[0].use.pkeys[0]" in printed.err


def test_an_api_server_that_is_away_is_an_error(server: FakeApi, shell: Shell) -> None:
    server.down = True
    printed = shell("policy", "check")
    assert (printed.code, "no answer" in printed.err) == (1, True)
