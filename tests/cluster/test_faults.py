"""Faults on a node and around it while pods run and start: pods run on, and nothing leaks."""

import time

import pytest

from tests.cluster.cluster import PATIENCE, Cluster, Namespace, is_ready, start_services
from tests.cluster.configurations import ipoib
from tests.cluster.installation import (
    HCA,
    await_agent,
    await_nothing_left,
    kill_agent,
    unplugged,
)
from tests.cluster.seen import pings, uverbs
from tests.waiting import until

AWAY = 120.0  # seconds


@pytest.fixture
def runs(namespace: Namespace) -> str:
    """A pod with an HCA and an interface, started before the fault."""
    namespace.network("fabric", ipoib("10.56.0.0/16"))
    namespace.pod("before", networks="fabric", devices={HCA: 1})
    namespace.running("before")
    return "before"


def seen(namespace: Namespace, name: str) -> tuple[set[str], str, int]:
    """The properties of a running pod that must not change: device, interface's address,
    restarts."""
    status = namespace.read(name).status.container_statuses[0]
    inside = namespace.run(name, "ip", "-o", "address", "show", "net1")
    return uverbs(namespace, name), inside, status.restart_count


def another_runs_and_both_go(namespace: Namespace, name: str) -> None:
    """A new pod reaches the pod `name`. Delete both, and require that nothing is left of them."""
    namespace.pod("after", networks="fabric", devices={HCA: 1})
    namespace.running("after")
    assert namespace.address("after") != namespace.address(name)
    assert pings(namespace, "after", namespace.address(name))
    namespace.delete("after", name)
    await_nothing_left(namespace.cluster)


def test_pods_run_on_and_start_after_the_kubelet_is_restarted_without_its_sockets(
    cluster: Cluster, namespace: Namespace, runs: str
) -> None:
    before = seen(namespace, runs)
    cluster.node.kill("kubelet")
    sockets = "/var/lib/kubelet/device-plugins/*.sock"
    cluster.node.run(f"rm -f {sockets}")
    cluster.node.start_kubelet()
    # Wait for two sockets, the kubelet's and our pool's, because the node's status lags behind.
    number = f"ls {sockets} | wc -l"
    until(lambda: int(cluster.node.run(number)) > 1, PATIENCE, "registration", pause=0.5)
    namespace.await_commands(runs)  # the kubelet lists its pods after its start
    assert seen(namespace, runs) == before
    another_runs_and_both_go(namespace, runs)


def test_pods_run_on_and_start_after_containerd_is_restarted(
    cluster: Cluster, namespace: Namespace, runs: str
) -> None:
    before = seen(namespace, runs)
    cluster.node.kill("containerd")
    cluster.node.start_containerd()
    until(cluster.is_ready, PATIENCE, "ready node", pause=0.5)
    namespace.await_commands(runs)  # the kubelet waits a while before it connects again
    assert seen(namespace, runs) == before
    another_runs_and_both_go(namespace, runs)


@pytest.mark.long
def test_pods_start_although_the_agent_is_killed_while_they_are_attached(
    cluster: Cluster, namespace: Namespace, runs: str
) -> None:
    before = seen(namespace, runs)
    names = [f"pod-{number}" for number in range(6)]
    for name in names:
        namespace.pod(name, networks="fabric", devices={HCA: 1})
    # The kubelet fails a pod for good if no plugin answers its Allocate.
    until(
        lambda: all(namespace.read(name).status.start_time for name in names),
        PATIENCE,
        "pods that the kubelet has admitted",
        pause=0.2,
    )
    # One pod is in its ADD: its entry is in the journal.
    entries = "ls /var/lib/podfabric/attachments | wc -l"
    until(lambda: int(cluster.node.run(entries)) > 1, PATIENCE, "entry of an ADD", pause=0.1)
    kill_agent(cluster)
    namespace.running(*names)
    addresses = {namespace.address(name) for name in (*names, runs)}
    assert len(addresses) == len(names) + 1
    assert seen(namespace, runs) == before
    namespace.delete(*names)
    another_runs_and_both_go(namespace, runs)


@pytest.mark.long
def test_pods_run_on_and_start_after_the_api_server_was_away_for_two_minutes(
    cluster: Cluster, namespace: Namespace, runs: str
) -> None:
    before = seen(namespace, runs)
    cluster.plane.stop_api_server()
    time.sleep(AWAY)
    cluster.plane.start_api_server()
    until(cluster.is_ready, PATIENCE, "ready node", pause=0.5)
    assert seen(namespace, runs) == before
    another_runs_and_both_go(namespace, runs)


def test_nothing_is_left_of_pods_that_are_force_deleted(
    cluster: Cluster, namespace: Namespace
) -> None:
    namespace.network("fabric", ipoib("10.56.0.0/16"))
    names = [f"pod-{number}" for number in range(4)]
    for name in names:
        namespace.pod(name, networks="fabric", devices={HCA: 1})
    namespace.running(names[0])  # the other pods are at some step of their start
    namespace.delete(*names, grace=0)
    await_nothing_left(cluster)


def test_a_pod_runs_on_without_its_hca_and_the_next_gets_one_that_is_back(
    cluster: Cluster, namespace: Namespace, runs: str
) -> None:
    """Unloading the driver's module does the same to the kernel's objects as a hot unplug."""
    restarts = namespace.read(runs).status.container_statuses[0].restart_count
    with unplugged(cluster):
        until(lambda: not cluster.allocatable(HCA), PATIENCE, f"node without {HCA}", pause=0.5)
        assert "net1" not in namespace.run(runs, "ip", "-o", "link", "show")
        pod = namespace.read(runs)
        assert is_ready(pod)
        assert pod.status.container_statuses[0].restart_count == restarts
        namespace.delete(runs)
        await_nothing_left(cluster)
    until(lambda: cluster.allocatable(HCA), PATIENCE, f"node with {HCA}", pause=0.5)
    namespace.pod("after", networks="fabric", devices={HCA: 1})
    namespace.running("after")
    assert len(uverbs(namespace, "after")) == 1


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_nothing_is_left_of_a_pod_after_a_restart_of_the_node_and_the_next_starts(
    cluster: Cluster, namespace: Namespace, runs: str
) -> None:
    """A kubelet that starts admits its pods again, before any device plugin has registered.

    It ends the pods with devices (UnexpectedAdmissionError), and their controllers create new ones.
    """
    cluster.node.pull_the_plug()
    cluster.node.boot()
    start_services(cluster)
    await_agent(cluster)

    def is_over() -> bool:
        pod = namespace.read(runs)
        runs_again = bool(pod.status.container_statuses[0].restart_count) and is_ready(pod)
        return runs_again or pod.status.phase == "Failed"

    until(is_over, 2 * PATIENCE, "pod that runs again or has failed", pause=1)
    namespace.pod("after", networks="fabric", devices={HCA: 1})
    namespace.running("after")
    assert len(uverbs(namespace, "after")) == 1
    assert "net1" in namespace.run("after", "ip", "-o", "address", "show", "net1")
    namespace.delete("after", runs)
    await_nothing_left(cluster)
