"""Limits that the containers of a pod share (`scope: pod`)."""

from collections.abc import Iterator
from typing import Any

import pytest

from base.paths import Paths
from deviceplugin import ledger
from deviceplugin.gpus import start
from gpu.group_limits import Limit
from tests.host.deviceplugin.gpus.gpu_node import (
    COMPUTE,
    GIB,
    MEMORY,
    GpuNode,
    await_restarted,
    container,
    edits,
    given,
    gpu_node_of,
    units,
)
from tests.kubelet.devices import NotStarted
from tests.kubelet.kubelet import Kubelet, Pod
from tests.unit.host.servers import gpu_uuid
from tests.waiting import PATIENCE, until

TWO = [container("a", memory=2, compute=20), container("b", memory=3, compute=30)]


@pytest.fixture
def node(paths: Paths, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuNode]:
    """Two GPUs with 8 units of memory each."""
    monkeypatch.setattr(start, "ASK_KUBELET", PATIENCE)
    new_node = GpuNode(paths, [units(8, scope="pod")], gpu_binding="start")
    kubelet.wait(lambda: kubelet.allocatable(MEMORY) == 16 and kubelet.allocatable(COMPUTE) == 200)
    yield new_node
    new_node.plugin.close()


def mounts(node: GpuNode, pod: Pod, name: str) -> dict[str, str]:
    """What a container sees of the host, by its own path."""
    found: list[dict[str, Any]] = edits(node.paths, pod, name)["mounts"]
    return {mount["containerPath"]: mount["hostPath"] for mount in found}


def test_containers_of_a_pod_share_the_sum_of_what_they_ask_for(
    node: GpuNode, kubelet: Kubelet
) -> None:
    pod = kubelet.admit("trainer", TWO)
    other = kubelet.admit("other", [container(memory=1, compute=10)])
    name = f"Pod-{pod.uid}.{gpu_uuid(0)}"
    assert node.groups.limits() == {
        name: [(gpu_uuid(0), 5 * GIB, 0.5)],
        f"Pod-{other.uid}.{gpu_uuid(0)}": [(gpu_uuid(0), GIB, 0.1)],
    }
    directory = node.paths.run / "gpu" / name
    assert mounts(node, pod, "a") == mounts(node, pod, "b")
    assert mounts(node, pod, "a")["/run/podfabric/gpu/region"] == str(directory / "region")
    assert pod.containers["a"].cdi != pod.containers["b"].cdi


def test_a_container_that_starts_later_adds_its_part_and_the_count_goes_on(
    node: GpuNode, kubelet: Kubelet
) -> None:
    pod = kubelet.admit("trainer", TWO, start=False)
    first, second = pod.requests
    pod.requests = [first]
    kubelet.run(pod)
    (name,) = node.groups.limits()
    assert node.groups.limits()[name] == [(gpu_uuid(0), 2 * GIB, 0.2)]
    region = node.paths.run / "gpu" / name / "region"
    region.write_text("what the first has")
    pod.requests = [second]
    kubelet.run(pod)
    assert node.groups.limits() == {name: [(gpu_uuid(0), 5 * GIB, 0.5)]}
    assert region.read_text() == "what the first has"


def test_a_pods_next_container_gets_the_gpu_of_its_first_though_another_is_fuller(
    node: GpuNode, kubelet: Kubelet
) -> None:
    """By `pack` alone it would get the fuller one."""
    first = kubelet.admit("first", [container(memory=6, compute=10)])
    pod = kubelet.admit("trainer", [container("a", memory=4), container("b", memory=2)])
    assert gpu_node_of(edits(node.paths, first)) == "/dev/nvidia0"
    assert {gpu_node_of(edits(node.paths, pod, name)) for name in "ab"} == {"/dev/nvidia1"}


def test_what_does_not_fit_beside_the_pods_other_containers_has_a_limit_of_its_own(
    node: GpuNode, kubelet: Kubelet
) -> None:
    pod = kubelet.admit("trainer", [container("a", memory=6), container("b", memory=4)])
    assert node.groups.limits() == {
        f"Pod-{pod.uid}.{gpu_uuid(0)}": [(gpu_uuid(0), 6 * GIB, 1.0)],
        f"Pod-{pod.uid}.{gpu_uuid(1)}": [(gpu_uuid(1), 4 * GIB, 1.0)],
    }


def test_an_init_container_leaves_its_part_to_the_next_and_it_counts_once(
    node: GpuNode, kubelet: Kubelet
) -> None:
    prepare = container("prepare", init=True, memory=2, compute=10)
    kubelet.admit("trainer", [prepare, container("main", memory=4, compute=40)])
    assert list(node.groups.limits().values()) == [[(gpu_uuid(0), 4 * GIB, 0.4)]]


def test_restarts_of_plugin_and_containers_change_no_limit_and_no_mount(
    node: GpuNode, kubelet: Kubelet
) -> None:
    pod = kubelet.admit("trainer", TWO)
    limits, before = node.groups.limits(), given(node.paths)
    files = {path: path.read_bytes() for path in node.paths.cdi.iterdir()}
    node.restart()
    await_restarted(kubelet)
    kubelet.run(pod)
    assert (node.groups.limits(), given(node.paths)) == (limits, before)
    assert {path: path.read_bytes() for path in node.paths.cdi.iterdir()} == files


def test_lost_checkpoint_is_filled_with_the_group_that_containers_see(
    node: GpuNode, kubelet: Kubelet
) -> None:
    kubelet.admit("trainer", TWO)
    groups = {gpu.group for gpu in given(node.paths)}
    node.plugin.close()
    node.paths.checkpoint.unlink()
    node.start()
    await_restarted(kubelet)
    assert {gpu.group for gpu in given(node.paths) if gpu.slot} == groups


def test_containers_that_run_keep_their_kind_of_limit_when_the_setting_changes(
    node: GpuNode, kubelet: Kubelet
) -> None:
    pod = kubelet.admit("trainer", TWO)
    limits = node.groups.limits()
    node.plugin.close()
    node.config = type(node.config)(pools=(), gpus=(units(8),), gpu_binding="start")
    node.start()
    await_restarted(kubelet)
    kubelet.run(pod)
    assert node.groups.limits() == limits
    kubelet.admit("later", TWO)
    assert len(node.groups.limits()) == 3


def test_group_goes_with_the_pod_and_not_before(
    node: GpuNode, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = kubelet.admit("trainer", TWO)
    monkeypatch.setattr(ledger, "YOUNG_GPU", 0.0)
    node.plugin.compare()
    assert len(node.groups.limits()) == 1
    kubelet.remove(pod)

    def gone() -> bool:
        node.plugin.compare()
        return not node.groups.limits() and not list(node.paths.cdi.iterdir())

    until(gone)


def test_what_an_agent_left_that_was_killed_before_it_removed_a_group_goes_with_the_next_one(
    node: GpuNode, kubelet: Kubelet
) -> None:
    """The ledger has forgotten it by then, as it is written first."""
    kubelet.admit("trainer", TWO)
    limits = node.groups.limits()
    node.plugin.close()
    left = [Limit(gpu_uuid(0), GIB, 1.0)]
    for group in (f"Pod-0000-00.{gpu_uuid(0)}", "podfabric.io-gpu-10g-25.00000000.10g-25.0"):
        node.groups.make(group, left)
    node.start()
    await_restarted(kubelet)
    until(lambda: node.groups.limits() == limits, what="removal of what was left")


def test_without_a_checkpoint_and_a_driver_nothing_of_containers_that_run_is_removed(
    node: GpuNode, kubelet: Kubelet
) -> None:
    kubelet.admit("trainer", TWO)
    before = given(node.paths)
    limits, files = node.groups.limits(), sorted(node.paths.cdi.iterdir())
    node.plugin.close()
    node.paths.checkpoint.unlink()
    node.driver.unload()
    node.start()
    node.plugin.compare()
    node.plugin.look()
    assert given(node.paths) == []
    assert (node.groups.limits(), sorted(node.paths.cdi.iterdir())) == (limits, files)
    node.driver.load(2)
    kubelet.wait(lambda: kubelet.allocatable(MEMORY) > 0)

    def adopted() -> bool:
        node.plugin.compare()
        groups = [{gpu.group for gpu in found} for found in (given(node.paths), before)]
        return groups[0] == groups[1]

    until(adopted)


def test_without_the_pods_uid_no_container_starts_and_later_it_does(
    node: GpuNode, kubelet: Kubelet
) -> None:
    pod = kubelet.admit("trainer", TWO, start=False)
    content = kubelet.checkpoint.read_bytes()
    kubelet.checkpoint.write_bytes(content[:20])
    with pytest.raises(NotStarted, match="does not say whose container starts"):
        kubelet.run(pod)
    assert node.groups.limits() == {}
    kubelet.checkpoint.write_bytes(content)
    kubelet.run(pod)
    assert len(node.groups.limits()) == 1
