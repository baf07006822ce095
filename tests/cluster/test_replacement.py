"""The agent is replaced, deleted and uninstalled while pods start, run and end."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest

from tests.cluster.cluster import PATIENCE, Cluster, Namespace, is_ready
from tests.cluster.configurations import ipoib
from tests.cluster.installation import (
    HCA,
    NAMESPACE,
    agents,
    await_agent,
    await_custodian_and_delete_it,
    await_nothing_left,
    await_watch_of_daemonsets,
    helm,
    upgrade,
)
from tests.cluster.seen import pings, uverbs
from tests.waiting import until

MANY = 20
AT_ONCE = 3
AGENT = "podfabric"
REFUSED = "UnexpectedAdmissionError"


@pytest.fixture
def fabric(namespace: Namespace) -> Namespace:
    """A namespace with a network."""
    namespace.network("fabric", ipoib("10.56.0.0/16"))
    return namespace


def start(namespace: Namespace, *names: str) -> None:
    """Create pods with an HCA and an interface."""
    for name in names:
        namespace.pod(name, networks="fabric", devices={HCA: 1})


def sandbox_failures(namespace: Namespace) -> list[str]:
    """The failures to create a pod's sandbox, which attaches its interfaces."""
    events = namespace.cluster.core.list_namespaced_event(namespace.name).items
    return [event.message for event in events if event.reason == "FailedCreatePodSandBox"]


@pytest.mark.long
def test_pods_start_although_the_agents_pod_is_deleted_meanwhile(fabric: Namespace) -> None:
    cluster = fabric.cluster
    names = [f"pod-{number}" for number in range(MANY)]
    start(fabric, *names)
    until(lambda: any(is_ready(pod) for pod in fabric.pods()), PATIENCE, "first pod", pause=0.2)
    (agent,) = (pod.metadata.name for pod in agents(cluster))
    Namespace(cluster, NAMESPACE).delete(agent)
    fabric.running(*names)
    assert len({fabric.address(name) for name in names}) == MANY
    await_agent(cluster)
    fabric.delete(*names)
    await_nothing_left(cluster)


def churn(namespace: Namespace, is_over: Callable[[], bool]) -> tuple[int, int]:
    """Start and delete pods until `is_over`; returns how many started and how many the kubelet
    refused."""
    started = refused = 0

    def is_settled(name: str) -> bool:
        pod = namespace.read(name)
        return is_ready(pod) or pod.status.reason == REFUSED

    while not is_over():
        names = [f"pod-{started + refused + number}" for number in range(AT_ONCE)]
        start(namespace, *names)
        until(
            lambda names=names: all(map(is_settled, names)),  # type: ignore[misc]
            PATIENCE,
            "pods that run",
            pause=0.2,
        )
        running = sum(is_ready(namespace.read(name)) for name in names)
        started, refused = started + running, refused + AT_ONCE - running
        namespace.delete(*names)
    return started, refused


@pytest.mark.long
def test_no_sandbox_fails_in_a_rolling_update(
    fabric: Namespace, record_property: Callable[[str, object], None]
) -> None:
    cluster = fabric.cluster
    start(fabric, "before")
    fabric.running("before")
    held = uverbs(fabric, "before"), fabric.address("before")
    (old,) = (pod.metadata.name for pod in agents(cluster))
    sets = cluster.objects.resources.get(api_version="apps/v1", kind="DaemonSet")
    now = datetime.now(UTC).isoformat()
    template = {"metadata": {"annotations": {"test.podfabric/restarted": now}}}
    sets.patch(
        name=AGENT,
        namespace=NAMESPACE,
        body={"spec": {"template": template}},
        content_type="application/strategic-merge-patch+json",
    )

    def is_over() -> bool:
        pods = agents(cluster)
        return len(pods) == 1 and pods[0].metadata.name != old and is_ready(pods[0])

    started, refused = churn(fabric, is_over)
    record_property("pods started during the update", started)
    record_property("pods refused by the kubelet during the update", refused)
    assert started
    assert sandbox_failures(fabric) == []
    assert (uverbs(fabric, "before"), fabric.address("before")) == held
    start(fabric, "after")
    fabric.running("after")
    assert pings(fabric, "after", fabric.address("before"))
    fabric.delete("before", "after")
    await_nothing_left(cluster)


@pytest.fixture
def uninstalled(cluster: Cluster) -> Iterator[Callable[[], None]]:
    """A function that uninstalls the chart. Afterwards it is installed again."""

    def uninstall() -> None:
        await_watch_of_daemonsets(cluster)
        helm(cluster, "uninstall", "podfabric", "--wait")

    yield uninstall
    upgrade(cluster, {})
    await_agent(cluster)


@pytest.mark.long
def test_a_pod_outlives_an_uninstallation_and_its_end_leaves_an_empty_node(
    fabric: Namespace, uninstalled: Callable[[], None]
) -> None:
    cluster = fabric.cluster
    start(fabric, "one", "two")
    fabric.running("one", "two")
    uninstalled()
    until(lambda: cluster.allocatable(HCA) == 0, PATIENCE, f"node without {HCA}", pause=1)
    assert pings(fabric, "one", fabric.address("two"))
    fabric.delete("one")
    assert cluster.node.run("ls /opt/cni/bin/ipoib /var/lib/podfabric/attachments")
    fabric.delete("two")
    await_custodian_and_delete_it(cluster)
    directories = "/opt/cni/bin /var/lib/podfabric /run/podfabric /var/lib/kubelet/device-plugins"
    left = cluster.node.run(f"find {directories} | grep -E 'podfabric/.|ipoib$|sriov$|rdma' || :")
    assert left == ""
