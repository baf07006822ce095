"""The file of the cluster's policies: it is whole or refused, and its rules are active."""

import subprocess
import sys
from pathlib import Path

import pytest

from base.paths import Paths
from base.pod import Pod
from cni.spec.errors import CNIError, Code
from policy import allowance, stored_policies
from policy.allowance import NotAllowed
from policy.rules import Policy
from policy.stored_policies import ClusterPolicies, StoredPolicy

POD = Pod(namespace="team-a", name="p", uid="u")
RULE = {
    "name": "one",
    "subjects": [{"namespaces": ["team-a"]}],
    "use": {"pkeys": ["0x8001"]},
}
LABELLED = {
    "name": "gold",
    "subjects": [{"namespaceSelector": {"matchLabels": {"tier": "gold"}}}],
    "use": {"pkeys": ["0x8002"]},
}


def policies(
    *rules: object, namespaces: dict[str, dict[str, str]] | None = None
) -> ClusterPolicies:
    stored = StoredPolicy(name="teams", uid="u-1", generation=1, rules=list(rules))
    return ClusterPolicies(policies=(stored,), namespaces=namespaces)


def unknown(path: Path) -> str:
    """The error text of a file that cannot be used. The error asks the runtime to try again."""
    with pytest.raises(CNIError) as raised:
        stored_policies.load(path)
    assert raised.value.code == Code.TRY_AGAIN
    return raised.value.message


def test_without_a_file_an_add_is_told_to_come_again(tmp_path: Path) -> None:
    assert "policies.json is missing" in unknown(tmp_path / "policies.json")


def test_a_file_that_lacks_its_end_or_has_another_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "policies.json"
    stored_policies.save(path, policies(RULE))
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert "is damaged" in unknown(path)
    for at, byte in enumerate(whole):
        path.write_bytes(whole[:at] + bytes((byte ^ 1,)) + whole[at + 1 :])
        assert "is damaged" in unknown(path)


def test_a_file_with_a_rule_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "policies.json"
    stored_policies.save(path, policies(RULE | {"use": {"pkeys": ["0x0"]}}))
    text = unknown(path)
    assert "FabricPolicy teams: spec.rules[0].use.pkeys[0]" in text


_KILLED = """
import os, signal, sys
from pathlib import Path
from policy.stored_policies import ClusterPolicies, save
def killed(*paths):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(os, sys.argv[2], killed)
save(Path(sys.argv[1]), ClusterPolicies(policies=(), namespaces=None))
"""


@pytest.mark.parametrize("step", ["pwrite", "fsync", "replace"])
def test_a_kill_at_any_step_of_writing_leaves_the_last_good_set(tmp_path: Path, step: str) -> None:
    path = tmp_path / "policies.json"
    stored_policies.save(path, policies(RULE))
    done = subprocess.run([sys.executable, "-c", _KILLED, str(path), step], check=False)
    assert done.returncode == -9
    assert stored_policies.load(path) == policies(RULE)
    stored_policies.save(path, policies(LABELLED))  # over what the killed one left
    assert stored_policies.load(path) == policies(LABELLED)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_node_that_does_not_follow_never_looks_at_the_cluster() -> None:
    def never() -> ClusterPolicies:
        raise AssertionError

    assert stored_policies.joined(Policy, never)() == Policy()


def test_the_rules_of_the_cluster_are_added_to_those_of_the_node() -> None:
    node = Policy(cluster=True, rules=policies(LABELLED).rules)
    source = stored_policies.joined(lambda: node, lambda: policies(RULE))
    assert [rule.title for rule in source().rules] == ["teams/gold", "teams/one"]


def test_a_process_for_one_call_goes_by_the_files(tmp_path: Path) -> None:
    paths = Paths(state=tmp_path / "state", etc=tmp_path / "etc")
    paths.etc.mkdir()
    source = stored_policies.on_node(paths)
    assert source() == Policy()
    paths.config.write_text("policy: {cluster: true}")
    with pytest.raises(CNIError) as raised:
        source()
    assert raised.value.code == Code.TRY_AGAIN
    stored_policies.save(
        paths.cluster_policies,
        policies(RULE, LABELLED, namespaces={"team-a": {"tier": "gold"}, "team-b": {}}),
    )
    allowed = allowance.of_pod(source(), POD)
    for pkey in (0x8001, 0x8002):
        allowed.using("pkeys", pkey, "pkey", hex(pkey))
    with pytest.raises(NotAllowed):
        allowed.using("pkeys", 0x8003, "pkey", "0x8003")
    with pytest.raises(CNIError) as raised:
        allowance.of_pod(source(), Pod(namespace="new", name="p"))
    assert raised.value.code == Code.TRY_AGAIN
    assert 'the labels of namespace "new"' in raised.value.message
