"""A node enforces the cluster's policies, also when API server, file or disk fail."""

import errno
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from base.pod import Pod
from cni.spec.errors import CNIError, Code
from kube.resources import Meta
from policy import allowance, stored_policies
from policy.allowance import NotAllowed
from policy.follower import UNREADABLE, FabricPolicy, NamespaceObject, PolicyFollower
from policy.rules import Policy
from policy.stored_policies import ClusterPolicies
from tests.fake_api import FakeApi, FakeClient, Fault
from tests.unit.policy.test_cluster import LABELLED, POD, RULE, policies
from tests.waiting import until

NODE = Policy(cluster=True)


def policy(name: str, *rules: object) -> FabricPolicy:
    return FabricPolicy(metadata=Meta(name=name), spec={"rules": list(rules)})


def namespace(name: str, **labels: str) -> NamespaceObject:
    return NamespaceObject(metadata=Meta(name=name, labels=labels))


def for_pkey(pkey: str) -> dict[str, Any]:
    return {**RULE, "use": {"pkeys": [pkey]}}


class Node:
    """A node that follows, and what its pods may use."""

    def __init__(self, client: FakeClient, directory: Path) -> None:
        self.client = client
        self.path = directory / "cluster_policies.json"
        self.follower = PolicyFollower(client, self.path)
        self.source = stored_policies.joined(lambda: NODE, self.follower.present)

    def may_use(self, pkey: int, pod: Pod = POD) -> bool:
        """Whether a rule of a policy lets the pod use it."""
        allowed = allowance.of_pod(self.source(), pod)
        try:
            allowed.using("pkeys", pkey, "pkey", hex(pkey))
        except NotAllowed:
            return False
        return allowed.titles() != ("config.yaml",)

    def told_to_come_again(self, pod: Pod = POD) -> str:
        with pytest.raises(CNIError) as raised:
            self.may_use(0x8001, pod)
        assert raised.value.code == Code.TRY_AGAIN
        return raised.value.message

    def written(self) -> ClusterPolicies | None:
        try:
            return stored_policies.load(self.path)
        except CNIError:
            return None

    def await_rules(self, *rules: object) -> None:
        """Wait until the first policy has these."""
        until(lambda: self.follower.present().policies[0].rules == list(rules), what="change")

    def titles(self) -> list[str]:
        return [rule.title for rule in self.follower.present().rules]


@contextmanager
def running(
    server: FakeApi, directory: Path, faults: Callable[[str, str, str], Fault | None] | None = None
) -> Iterator[Node]:
    node = Node(server.client("node-a", faults), directory)
    with closing(node.follower):
        node.follower.start()
        yield node


@contextmanager
def following(server: FakeApi, directory: Path) -> Iterator[Node]:
    """A node that has seen the policies, and written them."""
    with running(server, directory) as node:
        until(node.written, what="file")
        yield node


@pytest.fixture
def server() -> FakeApi:
    return FakeApi()


def test_a_kind_that_is_not_installed_is_not_taken_for_no_policy(
    server: FakeApi, tmp_path: Path
) -> None:
    def absent(verb: str, kind: str, name: str) -> Fault | None:
        return Fault.REFUSED if kind == "FabricPolicy" else None

    with running(server, tmp_path, absent) as node:
        until(lambda: node.client.calls["list", "FabricPolicy"], what="a try")
        node.told_to_come_again()


def test_a_policy_that_cannot_be_read_leaves_what_was_in_force(
    server: FakeApi, tmp_path: Path
) -> None:
    made = server.put(policy("teams", RULE))
    with following(server, tmp_path) as node:
        before = node.follower.present()
        torn = server.put(replace(made, spec={"rules": [for_pkey("0x0")]}))
        server.put(policy("second", LABELLED | {"subjects": [{"namespaces": ["team-b"]}]}))
        until(lambda: "second/gold" in node.titles(), what="second policy")
        assert node.may_use(0x8001)
        until(lambda: server.events, what="event")
        server.put(policy("third"))  # makes the follower look again
        until(lambda: len(node.follower.present().policies) == 3, what="third policy")
        (event,) = server.events
        assert (event.reason, event.regarding["name"]) == (UNREADABLE, "teams")
        assert event.regarding["uid"] == torn.metadata.uid
        assert "spec.rules[0].use.pkeys[0]" in event.message
        assert "generation 1 stays active" in event.message
        kept = node.written()
        assert kept is not None and before.policies[0] in kept.policies
    with following(server, tmp_path) as again:
        assert again.may_use(0x8001)


def test_a_policy_that_could_never_be_read_allows_its_pods_nothing(
    server: FakeApi, tmp_path: Path
) -> None:
    """As one of a later version of podfabric: its pods are not taken for pods without rules."""
    later = RULE | {"use": {"pkeys": ["0x8001"], "rails": [1]}}
    server.put(policy("later", later, later | {"name": "two"}))
    elsewhere = Pod(namespace="team-b", name="p")
    with following(server, tmp_path) as node:
        assert node.titles() == ["later/unreadable-0", "later/unreadable-1"]
        allowed = allowance.of_pod(node.source(), POD)
        with pytest.raises(NotAllowed, match="later/unreadable-0"):
            allowed.using("pkeys", 0x8001, "pkey", "0x8001")
        other = allowance.of_pod(node.source(), elsewhere)
        assert other.titles() == ("config.yaml",)
        until(lambda: server.events, what="event")
        assert "spec.rules[0].use.rails: unknown key" in server.events[0].message
        assert "only its subjects are active" in server.events[0].message
        server.put(policy("teams", RULE))
        until(lambda: node.may_use(0x8001), what="rule of another policy")
        until(lambda: node.written() == node.follower.present(), what="file")
    server.down = True
    with running(server, tmp_path) as again:
        assert again.titles() == ["later/unreadable-0", "later/unreadable-1", "teams/one"]


@pytest.mark.parametrize(
    "rules", [None, "all", [7], [RULE, {"name": "wrong", "subjects": [{"pods": ["p"]}]}]]
)
def test_a_policy_whose_subjects_cannot_be_read_is_for_all_pods(
    server: FakeApi, tmp_path: Path, rules: object
) -> None:
    """They have what other rules allow them, and nothing else."""
    server.put(policy("teams", RULE))
    server.put(FabricPolicy(metadata=Meta(name="odd"), spec={"rules": rules}))
    with following(server, tmp_path) as node:
        assert node.titles() == ["odd/unreadable", "teams/one"]
        assert node.may_use(0x8001)
        other = allowance.of_pod(node.source(), Pod("team-b", "p"))
        assert other.titles() == ("odd/unreadable",)
        until(lambda: server.events, what="event")
        assert "allows nothing for their pods" in server.events[0].message


def test_a_damaged_file_is_told_and_written_again(
    server: FakeApi, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.put(policy("teams", RULE))
    with following(server, tmp_path) as node:
        whole = node.path.read_bytes()
    node.path.write_bytes(whole[:-7])
    server.down = True
    with caplog.at_level(logging.WARNING), running(server, tmp_path) as node:
        assert "is damaged" in caplog.text
        node.told_to_come_again()
        server.down = False
        until(node.written, what="file")
        assert node.may_use(0x8001)
        assert node.path.read_bytes() == whole


def test_a_full_disk_does_not_keep_a_policy_from_being_in_force(
    server: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with following(server, tmp_path) as node:

        def full(path: Path, content: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

        with monkeypatch.context() as patched:
            patched.setattr(stored_policies, "write_atomically", full)
            server.put(policy("teams", RULE))
            until(lambda: node.may_use(0x8001), what="rule in force")
            assert node.written() != node.follower.present()
        node.follower.wake()
        until(lambda: node.written() == node.follower.present(), what="file")


def test_labels_are_followed_only_where_a_rule_looks_at_them(
    server: FakeApi, tmp_path: Path
) -> None:
    server.put(namespace("team-a", tier="gold"))
    server.put(policy("teams", RULE))
    with following(server, tmp_path) as node:
        assert node.may_use(0x8001)
        assert not node.client.calls["list", "Namespace"]
        server.put(policy("gold", LABELLED))
        until(lambda: node.follower.present().namespaces, what="labels")
        assert node.may_use(0x8002)
        server.put(namespace("team-b"))
        until(lambda: "team-b" in (node.follower.present().namespaces or {}), what="namespace")
        assert not node.may_use(0x8002, Pod(namespace="team-b", name="p"))
        assert 'namespace "new"' in node.told_to_come_again(Pod(namespace="new", name="p"))
        until(lambda: node.written() == node.follower.present(), what="file")
    server.down = True
    with running(server, tmp_path) as node:
        assert node.may_use(0x8002)


def test_a_namespace_that_is_made_again_has_no_label_of_the_former_one(
    server: FakeApi, tmp_path: Path
) -> None:
    server.put(policy("gold", LABELLED))
    server.put(namespace("team-a", tier="gold"))
    with following(server, tmp_path) as node:
        until(lambda: node.follower.present().namespaces, what="labels")
        assert node.may_use(0x8002)
        server.remove(NamespaceObject, "team-a")
        until(lambda: node.follower.present().namespaces == {}, what="end of the namespace")
        assert 'namespace "team-a"' in node.told_to_come_again()
        server.put(namespace("team-a"))
        until(lambda: node.follower.present().namespaces, what="namespace")
        assert not node.may_use(0x8002)


def test_each_add_sees_one_set_of_rules_while_policies_change(
    server: FakeApi, tmp_path: Path
) -> None:
    """P_Keys 0x8001 and 0x8002 belong to one version, 0x8003 and 0x8004 to the other."""
    versions = [
        [for_pkey(first) | {"name": "first"}, for_pkey(second) | {"name": "second"}]
        for first, second in (("0x8001", "0x8002"), ("0x8003", "0x8004"))
    ]
    made = server.put(policy("teams", *versions[0]))
    seen: list[tuple[bool, ...]] = []
    over = threading.Event()
    with following(server, tmp_path) as node:

        def attach() -> None:
            while not over.is_set():
                allowed = allowance.of_pod(node.source(), POD)
                seen.append(tuple(_allows(allowed, pkey) for pkey in range(0x8001, 0x8005)))

        threads = [threading.Thread(target=attach) for _ in range(3)]
        for thread in threads:
            thread.start()
        for turn in range(20):
            rules = versions[(turn + 1) % 2]
            made = server.put(replace(made, spec={"rules": rules}))
            node.await_rules(*rules)
        over.set()
        for thread in threads:
            thread.join()
    assert set(seen) == {(True, True, False, False), (False, False, True, True)}


def _allows(allowed: allowance.Allowance, pkey: int) -> bool:
    try:
        allowed.using("pkeys", pkey, "pkey", hex(pkey))
    except NotAllowed:
        return False
    return True


def test_the_file_is_json_that_a_person_can_read(server: FakeApi, tmp_path: Path) -> None:
    server.put(policy("teams", RULE))
    with following(server, tmp_path) as node:
        file = msgspec.json.decode(node.path.read_bytes())
    assert file["policies"]["policies"][0]["rules"] == [RULE]
    assert node.follower.present().rules == policies(RULE).rules
