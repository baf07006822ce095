"""Locked memory of containers on a real kubelet and containerd."""

import re

import pytest

from deviceplugin.allocate.memlock import HOOK
from tests.cluster.cluster import PATIENCE, Cluster, Namespace, pod
from tests.cluster.installation import HCA
from tests.cluster.node import CNI_BIN
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


def _await_shown(cluster: Cluster, namespace: Namespace, names: set[str]) -> None:
    """Wait until the FabricNode shows the raised limit of just these pods."""
    kind = cluster.objects.resources.get(
        api_version="fabric.podfabric.io/v1alpha1", kind="FabricNode"
    )

    def shown() -> bool:
        rows = kind.get(name=cluster.node.name).to_dict()["status"].get("lockedMemory", ())
        found = {row["pod"]: (row["limit"], row.get("wanted")) for row in rows}
        own = {pod for pod in found if pod.startswith(f"{namespace.name}/")}
        return {pod: found[pod] for pod in own} == {
            f"{namespace.name}/{name}": ("unlimited", None) for name in names
        }

    until(shown, PATIENCE, "the limits in the FabricNode", pause=1)


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
    _await_shown(cluster, namespace, {"root", "anybody"})
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


@pytest.mark.long
def test_a_killed_hook_is_told_and_the_next_start_has_the_limit(
    cluster: Cluster, namespace: Namespace
) -> None:
    hook, real = CNI_BIN / HOOK, CNI_BIN / f"{HOOK}.real"
    cluster.node.run(f"mv {hook} {real} && printf '#!/bin/sh\nkill -9 $$\n' > {hook}")
    cluster.node.run(f"chmod 755 {hook}")
    try:
        namespace.pod("one", devices={HCA: 1})
        until(
            lambda: any("hook" in each and "killed" in each for each in namespace.events("one")),
            PATIENCE,
            "the event about the hook",
            pause=0.5,
        )
        namespace.pod("without")
        namespace.running("without")
    finally:
        cluster.node.run(f"mv {real} {hook}")
    namespace.running("one")
    assert _own(namespace, "one") == RAISED
    assert _own(namespace, "without") != RAISED
