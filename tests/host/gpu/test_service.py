"""The whole agent's part of GPU limits: its threads, and its scrapes."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from deviceplugin import plugin
from gpu import limit_service
from gpu.driver import nvml
from gpu.driver.gpu_inventory import LimitedGPU
from gpu.gpu_pool import GpuLimitSettings
from gpu.limit_service import GpuService
from gpu.limits import shims
from gpu.limits.limits_file import Limit
from gpu.watch import gpu_metrics
from gpu.watch.compute_shares import TICK
from gpu.watch.usage_watch import NodeSample
from tests.host.gpu.driver_root import paths_with
from tests.host.gpu.pods import made_container
from tests.host.gpu.served_node import FIRST, SECOND, ServedNode, text_of
from tests.standin.gpus import GIB, MIB
from tests.unit.gpu.groups import PlainRegions
from tests.waiting import until


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ServedNode]:
    with ExitStack() as stack:
        yield ServedNode(tmp_path, stack)


def test_only_shared_gpus_are_watched_and_foreign_processes_live(
    node: ServedNode, caplog: pytest.LogCaptureFixture
) -> None:
    """Other GPUs may belong to a pool of replicas or to another device plugin."""
    node.install_driver()
    limited = [LimitedGPU(uuid=FIRST, minor=0)]
    started = node.start(on_overuse="kill", limited=limited)
    holder = node.container("h", Limit(FIRST, 4 * GIB, 1.0))
    elsewhere, stranger = (node.stack.enter_context(made_container()) for _ in range(2))
    held = node.process(holder, GIB)
    on_second = node.process(elsewhere, GIB, device=1)
    on_first = node.process(stranger, 4 * GIB)
    looked = started.sample
    until(lambda: started.sample.at > looked.at + 2.5, what="more looks")
    assert held.process.poll() is None
    assert on_second.process.poll() is on_first.process.poll() is None
    assert [gpu.uuid for gpu in started.sample.gpus] == [FIRST]
    assert "No such file" not in caplog.text


def test_a_driver_that_comes_later_is_used_at_the_next_try_without_a_restart(
    node: ServedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of its GPUs are offered within ten seconds, according to the periods of all looks."""
    known = limit_service.TRY_AGAIN + TICK + limit_service.LOOK
    assert max(known, shims.LOOK_AGAIN) + 2 * plugin.LOOK_EVERY <= 10
    monkeypatch.setattr(limit_service, "TRY_AGAIN", 0.2)
    tried: list[str] = []
    open_driver = nvml.open_driver

    def opening(directory: Path) -> nvml.Nvml:
        tried.append("begun")
        opened = open_driver(directory)
        tried.append("opened")
        return opened

    monkeypatch.setattr(nvml, "open_driver", opening)
    started = node.start()
    node.container("a", Limit(FIRST, GIB, 1.0))
    until(lambda: started.sample.tenants, what="tenant")
    assert "no libnvidia-ml.so.1" in started.sample.problem
    shown = node.values()
    assert shown["nvml_up", ""] == 0
    assert shown["memory_limit_bytes", "pod-of-a/0"] == GIB
    assert not {name for name, _ in shown} & {"memory_device_bytes", "capacity_bytes"}
    node.install_driver()
    tries = len(tried)
    until(lambda: started.sample.nvml_up, what="NVML")
    assert (
        "opened" in tried[tries - 1 : tries + 2]
    )  # the first that began after that, at the latest
    assert node.values()["memory_device_bytes", "pod-of-a/0"] == 0
    assert started.memory()[FIRST].total == 16 * GIB


def test_a_driver_that_goes_and_comes_back_is_opened_again(
    node: ServedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limit_service, "TRY_AGAIN", 0.2)
    node.install_driver()
    started = node.start()
    node.container("a", Limit(FIRST, GIB, 1.0))
    until(lambda: started.sample.nvml_up, what="NVML")
    listed = node.directory / "proc/driver/nvidia/gpus"
    shutil.move(listed, node.directory / "gone")
    node.tenants.clear()
    until(lambda: not started.sample.gpus, what="end of the GPUs")
    shutil.move(node.directory / "gone", listed)
    until(lambda: len(started.sample.gpus) == 2, what="the GPUs again")


def test_a_node_without_gpus_loads_no_nvml(node: ServedNode) -> None:
    made = GpuLimitSettings(driver_root=node.directory)
    paths = paths_with(node.directory, ())
    started = GpuService(paths, lambda: node.tenants, made, regions=PlainRegions())
    node.stack.callback(started.close)
    started.start()
    until(lambda: started.sample.problem == limit_service.NO_DRIVER, what="look")


def test_the_series_of_containers_and_after_their_end(
    node: ServedNode,
) -> None:
    node.install_driver()
    started = node.start()
    busy = node.container("a", Limit(FIRST, 4 * GIB, 0.25))
    node.container("b", Limit(SECOND, 4 * GIB, 0.5))
    node.container("idle", Limit(FIRST, 8 * GIB, 1.0))
    process = node.process(busy, GIB)
    node.process(node.stack.enter_context(made_container()), 2 * GIB)  # holds no part

    wanted = {
        ("nvml_up", ""): 1,
        ("memory_limit_bytes", "pod-of-a/0"): 4 * GIB,
        ("memory_device_bytes", "pod-of-a/0"): GIB + 300 * MIB,
        ("memory_device_bytes", "pod-of-b/1"): 0,
        ("memory_device_bytes", "pod-of-idle/0"): 0,
        ("memory_overuse_bytes", "pod-of-a/0"): 0,
        ("memory_used_bytes", "pod-of-a/0"): 0,
        ("memory_denied_total", "pod-of-a/0"): 0,
        ("compute_share_ratio", "pod-of-a/0"): 0.25,
        ("compute_utilization_ratio", "pod-of-a/0"): 0,
        ("processes", "pod-of-a/0"): 0,
        ("lock_recoveries_total", "pod-of-a/0"): 0,
        ("tenants", "0"): 2,
        ("tenants", "1"): 1,
        ("capacity_bytes", "0"): 16 * GIB - 600 * MIB,
        ("allocated_share_ratio", "0"): 1.25,
        ("unaccounted_bytes", "0"): 2 * GIB + 300 * MIB,
        ("unaccounted_bytes", "1"): 0,
    }
    until(lambda: wanted.items() <= node.values().items(), what="series of both")
    process.kill()
    key = "memory_device_bytes", "pod-of-a/0"
    until(lambda: node.values()[key] == 0, what="end of the process")
    node.tenants[:] = [tenant for tenant in node.tenants if tenant.group != "a"]
    started.groups.remove("a")
    until(lambda: "pod-of-a" not in node.scrape(), what="end of the container's series")
    assert "pod-of-idle" in node.scrape()


def test_before_the_first_look_there_is_no_series_of_a_container() -> None:
    text = text_of(lambda: gpu_metrics.families(NodeSample(), {}, 1e6, 1e9))
    assert "podfabric_gpu_nvml_up 0.0" in text
    assert "namespace=" not in text
