"""Locked memory of containers on a real kubelet and containerd."""

import re

import pytest

from tests.cluster.cluster import PATIENCE, Cluster, Namespace, pod
from tests.cluster.installation import HCA
from tests.waiting import until

LIMIT = re.compile(r"^Max locked memory +(\S+) +(\S+)", re.MULTILINE)
RAISED = ("unlimited", "unlimited")


def _own(namespace: Namespace, name: str) -> tuple[str, ...]:
    """The limit of the container's process, which `kubectl exec` does not share."""
    match = LIMIT.search(namespace.run(name, "cat", "/proc/1/limits"))
    assert match is not None
    return match.groups()


def _restart(namespace: Namespace, name: str, count: int) -> None:
    # Later, because the end of process 1 kills the command too.
    namespace.run(name, "/bin/sh", "-c", "(sleep 1; kill 1) > /dev/null 2>&1 &")
    until(
        lambda: namespace.read(name).status.container_statuses[0].restart_count == count,
        PATIENCE,
        "restart",
        pause=0.5,
    )
    namespace.running(name)


@pytest.mark.long
def test_containers_with_an_hca_may_lock_all_memory_in_each_of_their_starts(
    cluster: Cluster, namespace: Namespace
) -> None:
    found = cluster.node.run("cat /proc/$(pidof containerd)/limits")
    of_runtime = LIMIT.search(found)
    assert of_runtime is not None
    assert of_runtime.groups() != RAISED
    names = {"root": 0, "anybody": 1000, "without": 0}
    for name, user in names.items():
        document = pod(name, devices={} if name == "without" else {HCA: 1})
        document["spec"]["containers"][0]["securityContext"] = {
            "runAsUser": user,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        namespace.apply(document)
    namespace.running(*names)
    wanted = {"root": RAISED, "anybody": RAISED, "without": of_runtime.groups()}
    assert {name: _own(namespace, name) for name in names} == wanted
    for count in (1, 2):
        for name in names:
            _restart(namespace, name, count)
        assert {name: _own(namespace, name) for name in names} == wanted
        if count == 1:
            cluster.node.kill("containerd")
            cluster.node.start_containerd()
            until(cluster.is_ready, PATIENCE, "ready node", pause=0.5)
            for name in names:
                namespace.await_commands(name)
            assert {name: _own(namespace, name) for name in names} == wanted
