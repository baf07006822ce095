"""GPUs that are chosen at the container's start: names at admission, their files at the start."""

from collections.abc import Iterator

import pytest

from base.paths import Paths
from deviceplugin import ledger
from deviceplugin.allocate import cdi
from deviceplugin.checkpoint import AllocatedGPU
from gpu.limits.limits_file import Limit
from gpu.pools import pre_start
from tests.host.deviceplugin.gpus.gpu_node import (
    COMPUTE,
    GIB,
    MEMORY,
    GpuNode,
    await_restarted,
    bound,
    compared,
    container,
    edits,
    given,
    gpu_node_of,
    swap_nodes,
    units,
)
from tests.kubelet.devices import NotStarted
from tests.kubelet.kubelet import Kubelet
from tests.unit.host.servers import gpu_uuid
from tests.waiting import PATIENCE, until

TWO = [container("a", memory=2, compute=20), container("b", memory=3, compute=30)]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pre_start, "ASK_KUBELET", PATIENCE)


@pytest.fixture
def node(paths: Paths, kubelet: Kubelet) -> Iterator[GpuNode]:
    new_node = GpuNode(paths, [units(8)])
    kubelet.wait(lambda: kubelet.allocatable(MEMORY) == 16 and kubelet.allocatable(COMPUTE) == 200)
    yield new_node
    new_node.plugin.close()


def test_admission_gives_a_name_and_the_start_defines_it(node: GpuNode, kubelet: Kubelet) -> None:
    pod = kubelet.admit("trainer", [container(memory=2, compute=50)], start=False)
    assert list(node.paths.cdi.glob("*")) == []
    kubelet.run(pod)
    given_now = pod.containers["main"]
    assert (given_now.devices, given_now.mounts, given_now.env) == ({}, {}, {})
    found = edits(node.paths, pod)
    first = next(each for each in found["deviceNodes"] if each["path"] == "/dev/nvidia0")
    assert first == {
        "path": "/dev/nvidia0",
        "hostPath": str(node.paths.dev / "nvidia0"),
        "type": "c",
        "major": 195,
        "minor": 0,
        "permissions": "rw",
    }
    assert len(found["deviceNodes"]) == 4
    assert "NVIDIA_VISIBLE_DEVICES=void" in found["env"]
    assert [mount["containerPath"] for mount in found["mounts"]] == [
        "/run/podfabric/gpu/limits",
        "/run/podfabric/gpu/region",
        "/run/podfabric/gpu/agent",
    ]
    assert found["mounts"][0]["options"][0] == "ro"
    (limits,) = node.groups.limits().values()
    assert limits == (gpu_uuid(0), 2 * GIB, 0.5)


def test_memory_moves_to_the_gpu_that_has_the_time(node: GpuNode, kubelet: Kubelet) -> None:
    first = kubelet.admit("first", [container(memory=2, compute=80)])
    second = kubelet.admit("second", [container(memory=2, compute=50)])
    assert gpu_node_of(edits(node.paths, first)) == "/dev/nvidia0"
    assert gpu_node_of(edits(node.paths, second)) == "/dev/nvidia1"
    assert bound(node.paths) == {gpu_uuid(0): (2, 80), gpu_uuid(1): (2, 50)}
    by_group = {gpu.group: gpu.uuid for gpu in given(node.paths)}
    assert sorted(by_group.values()) == [gpu_uuid(0), gpu_uuid(1)]
    assert all(
        len({gpu.uuid for gpu in given(node.paths) if gpu.group == group}) == 1
        for group in by_group
    )
    # Moved memory counts only on its new GPU: two other containers fill both GPUs.
    for name, percent in (("third", 20), ("fourth", 50)):
        kubelet.admit(name, [container(memory=6, compute=percent)])
    assert bound(node.paths) == {gpu_uuid(0): (8, 100), gpu_uuid(1): (8, 100)}


def test_container_that_fits_nowhere_does_not_start_and_gets_nothing_until_there_is_room(
    node: GpuNode, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One GPU has the time that it requests, and the other one has the memory."""
    kubelet.admit("first", [container(memory=8, compute=10)])
    second = kubelet.admit("second", [container(memory=2, compute=60)])
    third = kubelet.admit("third", [container(memory=2, compute=50)], start=False)
    monkeypatch.setattr(ledger, "YOUNG_GPU", 0.0)
    before, entries = sorted(node.paths.cdi.iterdir()), given(node.paths)
    for _ in range(2):
        text = "nvidia0 has 0 GiB and 90 %; nvidia1 has 6 GiB and 40 %"
        with pytest.raises(NotStarted, match=text):
            kubelet.run(third)
    assert sorted(node.paths.cdi.iterdir()) == before
    assert given(node.paths) == entries
    kubelet.remove(second)
    # The third's memory is reserved there since its admission; its time is on no GPU yet.
    reserved = {gpu_uuid(0): (8, 10), gpu_uuid(1): (2, 0), "": (0, 50)}
    until(lambda: compared(node) and bound(node.paths) == reserved, what="end of the second")
    kubelet.run(third)
    assert bound(node.paths) == {gpu_uuid(0): (8, 10), gpu_uuid(1): (2, 50)}


def test_container_that_starts_again_keeps_its_gpu(node: GpuNode, kubelet: Kubelet) -> None:
    first = kubelet.admit("first", [container(memory=2, compute=80)])
    second = kubelet.admit("second", [container(memory=2, compute=50)])
    kubelet.remove(first)
    before = edits(node.paths, second)
    kubelet.run(second)
    assert edits(node.paths, second) == before


def test_restart_touches_no_file_of_a_running_container(node: GpuNode, kubelet: Kubelet) -> None:
    pod = kubelet.admit("trainer", [container(memory=2, compute=50)])
    roots = (node.paths.cdi, node.paths.run / "gpu")
    files = {path: path.stat() for root in roots for path in root.rglob("*")}
    node.restart()
    await_restarted(kubelet)
    kubelet.run(pod)
    now = {path: path.stat() for root in roots for path in root.rglob("*") if path.name != "limits"}
    assert {path: status.st_ino for path, status in now.items()} == {
        path: status.st_ino for path, status in files.items() if path.name != "limits"
    }
    (cdi,) = node.paths.cdi.iterdir()
    assert cdi.stat().st_mtime_ns == files[cdi].st_mtime_ns


def test_slot_that_is_given_again_has_no_file_until_its_holder_starts(
    node: GpuNode, kubelet: Kubelet
) -> None:
    """A runtime that looks too early must find nothing, rather than another pod's GPU."""
    first = kubelet.admit("first", [container(memory=8, compute=10)])
    name = first.containers["main"].cdi
    kubelet.remove(first)
    second = kubelet.admit("second", [container(memory=8, compute=10)], start=False)
    third = kubelet.admit("third", [container(memory=8, compute=10)], start=False)
    assert list(node.paths.cdi.iterdir()) == []
    kubelet.run(second)
    kubelet.run(third)
    assert name in (second.containers["main"].cdi, third.containers["main"].cdi)
    nodes = {gpu_node_of(edits(node.paths, pod)) for pod in (second, third)}
    assert nodes == {"/dev/nvidia0", "/dev/nvidia1"}


def test_name_of_a_slot_stands_for_another_gpu_with_its_next_holder(
    node: GpuNode, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rounds as in tests/cluster/test_gpus.py."""
    names = []
    for pods in (((80, 0), (50, 1), (20, 0)), ((20, 0), (80, 0), (50, 1))):
        admitted = []
        for percent, gpu in pods:
            pod = kubelet.admit(f"trainer-{percent}", [container(memory=1, compute=percent)])
            assert gpu_node_of(edits(node.paths, pod)) == f"/dev/nvidia{gpu}"
            admitted.append(pod)
        names.append([pod.containers["main"].cdi for pod in admitted])
        for pod in admitted:
            kubelet.remove(pod)

        def gone() -> bool:
            node.plugin.compare()
            return list(node.paths.cdi.iterdir()) == []

        with monkeypatch.context() as patch:
            patch.setattr(ledger, "YOUNG_GPU", 0.0)
            until(gone)
    assert names[0] == names[1]


def test_file_that_cannot_be_written_is_an_error_and_the_next_start_succeeds(
    node: GpuNode, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = kubelet.admit("trainer", [container(memory=2, compute=50)], start=False)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "x.json")

    with monkeypatch.context() as patch:
        patch.setattr(cdi, "put", full)
        with pytest.raises(NotStarted, match="No space left on device"):
            kubelet.run(pod)
    kubelet.run(pod)
    assert gpu_node_of(edits(node.paths, pod)) == "/dev/nvidia0"


def test_container_has_its_gpu_again_though_a_reboot_gave_it_another_node(
    node: GpuNode, kubelet: Kubelet
) -> None:
    pod = kubelet.admit("trainer", [container(memory=2, compute=50)])
    node.plugin.close()
    swap_nodes(node.paths)
    node.start()
    await_restarted(kubelet)
    kubelet.run(pod)
    assert gpu_node_of(edits(node.paths, pod)) == "/dev/nvidia1"
    assert {(gpu.uuid, gpu.minor) for gpu in given(node.paths)} == {(gpu_uuid(0), 1)}


@pytest.mark.parametrize("content", [b"", b"{", b"\0" * 100])
def test_damaged_file_is_replaced_at_the_next_start(
    node: GpuNode, kubelet: Kubelet, content: bytes
) -> None:
    pod = kubelet.admit("trainer", [container(memory=2, compute=50)])
    (file,) = node.paths.cdi.iterdir()
    whole = file.read_bytes()
    file.write_bytes(content)
    kubelet.run(pod)
    assert file.read_bytes() == whole


def test_next_start_repairs_a_kill_between_ledger_and_file(node: GpuNode, kubelet: Kubelet) -> None:
    pod = kubelet.admit("trainer", [container(memory=2, compute=50)])
    before = given(node.paths)
    node.plugin.close()
    for file in node.paths.cdi.iterdir():
        file.unlink()
    for group in node.groups.limits():
        node.groups.remove(group)
    node.start()
    await_restarted(kubelet)
    kubelet.run(pod)
    assert given(node.paths) == before
    assert gpu_node_of(edits(node.paths, pod)) == "/dev/nvidia0"
    assert len(node.groups.limits()) == 1


def test_lost_checkpoint_is_filled_with_the_gpus_that_containers_have(
    node: GpuNode, kubelet: Kubelet
) -> None:
    """This includes a container whose GPU no id names, and its time, which names no GPU."""
    pods = [kubelet.admit(name, [container(memory=2, compute=70)]) for name in ("first", "second")]
    before = given(node.paths)
    files = {path: path.read_bytes() for path in node.paths.cdi.iterdir()}
    node.plugin.close()
    node.paths.checkpoint.unlink()
    node.start()
    await_restarted(kubelet)
    key = AllocatedGPU.__struct_fields__
    assert sorted(given(node.paths), key=lambda gpu: [str(getattr(gpu, name)) for name in key]) == (
        sorted(before, key=lambda gpu: [str(getattr(gpu, name)) for name in key])
    )
    for pod in pods:
        kubelet.run(pod)
    assert {path: path.read_bytes() for path in node.paths.cdi.iterdir()} == files


def test_next_agent_removes_the_group_that_a_killed_agent_left(
    node: GpuNode, kubelet: Kubelet
) -> None:
    """The ledger has forgotten the group by then, because the agent writes the ledger first."""
    kubelet.admit("trainer", TWO)
    limits = node.groups.limits()
    node.plugin.close()
    left = Limit(gpu_uuid(0), GIB, 1.0)
    for group in ("alnair-vgpu-memory.GPU-00000000_0", "podfabric.io-gpu-10g-25.00000000.10g-25.0"):
        node.groups.make(group, left)
    node.start()
    await_restarted(kubelet)
    until(lambda: node.groups.limits() == limits, what="removal of what was left")


def test_without_checkpoint_and_driver_running_containers_keep_their_groups(
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
