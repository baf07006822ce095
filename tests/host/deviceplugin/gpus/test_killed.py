"""The device plugin is killed at each step of an Allocate and of a start, and another one
continues."""

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from base.paths import Paths
from deviceplugin import checkpoint
from gpu.pools import pre_start
from tests.host.deviceplugin.gpus.gpu_node import (
    COMPUTE,
    GIB,
    MEMORY,
    GpuNode,
    container,
    units,
)
from tests.kubelet.kubelet import Kubelet
from tests.unit.gpu.groups import FileGroups
from tests.unit.host.servers import gpu_uuid
from tests.waiting import PATIENCE


class Killed(BaseException):
    """Simulates the end of a killed process: no code runs after it."""


class Steps:
    """Ends the process before its n-th change of a file."""

    def __init__(self, last: int) -> None:
        self.left = last
        self._thread = threading.get_ident()  # the plugin's other threads continue

    def before(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
            if threading.get_ident() == self._thread:
                self.left -= 1
                if self.left == 0:
                    raise Killed
            return change(*arguments, **named)

        return counted

    def count_in(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(os, "replace", self.before(os.replace))
        patch.setattr(os, "unlink", self.before(os.unlink))
        patch.setattr(os, "fsync", self.before(os.fsync))
        patch.setattr(FileGroups, "remove", self.before(FileGroups.remove))
        patch.setattr(FileGroups, "_put", self.before(FileGroups._put))


@pytest.fixture
def node(paths: Paths, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuNode]:
    monkeypatch.setattr(pre_start, "ASK_KUBELET", PATIENCE)
    new_node = GpuNode(paths, [units(8)])
    await_lists(kubelet)
    yield new_node
    new_node.plugin.close()


def await_lists(kubelet: Kubelet) -> None:
    kubelet.wait(lambda: kubelet.allocatable(MEMORY) == 16 and kubelet.allocatable(COMPUTE) == 200)


def killed(node: GpuNode, kubelet: Kubelet, call: Callable[[], object], step: int) -> bool:
    """Whether the call had that many steps. If so, it was killed there, and another plugin runs
    now."""
    with pytest.MonkeyPatch.context() as patch:
        Steps(step).count_in(patch)
        try:
            call()
        except Killed:
            pass
        else:
            return False
    before = {name: kubelet.count("ListAndWatch", name) for name in (MEMORY, COMPUTE)}
    node.restart()

    def reads_again(name: str) -> bool:
        return kubelet.count("ListAndWatch", name) > before[name] and kubelet.allocatable(name) > 0

    kubelet.wait(lambda: reads_again(MEMORY) and reads_again(COMPUTE))
    return True


def test_start_after_a_kill_at_any_step_of_a_start_is_whole(
    node: GpuNode, kubelet: Kubelet
) -> None:
    def start_killed(step: int) -> bool:
        pod = kubelet.admit(f"trainer-{step}", [container(memory=1, compute=5)], start=False)
        (held,) = [
            held for held in kubelet.held() if (held.uid, held.resource) == (pod.uid, MEMORY)
        ]
        service = node.plugin._gpus.services[MEMORY]
        done = killed(node, kubelet, lambda: service.pre_start(list(held.devices)), step)
        kubelet.run(pod)
        (entry,) = [
            one
            for one in checkpoint.read(node.paths).allocations
            if one.resource == MEMORY and one.id in held.devices
        ]
        assert entry.gpu is not None
        assert node.groups.limits()[entry.gpu.group] == (entry.gpu.uuid, GIB, 0.05)
        content = (node.paths.cdi / f"podfabric-slot-{entry.gpu.group}.json").read_bytes()
        assert f"/dev/nvidia{entry.gpu.minor}".encode() in content
        return done

    steps = next(step for step in range(1, 16) if not start_killed(step)) - 1
    assert steps >= 5  # twice fsync and rename, and a write of limits


def test_pod_after_a_kill_at_any_step_of_an_allocate_has_what_it_asks_for(
    node: GpuNode, kubelet: Kubelet
) -> None:
    def allocate_killed(step: int) -> bool:
        service = node.plugin._gpus.services[MEMORY]
        return killed(node, kubelet, lambda: service.allocate([f"{gpu_uuid(0)}_{step}"]), step)

    steps = next(step for step in range(1, 8) if not allocate_killed(step)) - 1
    assert steps >= 3
    pod = kubelet.admit("trainer", [container(memory=8, compute=50)])
    assert len(pod.containers["main"].cdi) == 1
    (limits,) = node.groups.limits().values()
    assert limits[1] == 8 * GIB
