"""`podfabric doctor` on a server with GPUs: each thing that can be wrong with them is seen."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from base.paths import Paths
from cli import doctor
from cli.checks import Finding
from gpu.limits import processes
from node.state import ThisNode
from tests.unit.cli.commands import short_path
from tests.unit.cli.gpu_server import SLICE, SLICES, GpuServer
from tests.unit.host import servers

pytestmark = pytest.mark.root


@pytest.fixture
def server() -> Iterator[GpuServer]:
    with short_path() as directory:
        yield GpuServer(servers.dgx(directory))


def _found(paths: Paths, check: str) -> list[Finding]:
    checks = [each for each in doctor.CHECKS if each[0] == check]
    assert checks
    return doctor.examine(ThisNode(paths, tolerant=True), checks)


def _only(paths: Paths, check: str) -> Finding:
    (finding,) = _found(paths, check)
    assert finding.remedy or finding.status in ("ok", "not applicable")
    return finding


GPU_CHECKS = [name for name, _ in doctor.CHECKS if name.startswith("GPU ") and name != "GPU memory"]


@pytest.mark.parametrize("check", GPU_CHECKS)
def test_a_node_without_pools_of_gpus_has_nothing_to_check(server: GpuServer, check: str) -> None:
    server.paths.config.write_text("pools: []")

    assert _only(server.paths, check).status == "not applicable"


def test_gpus_with_their_nodes_are_well(server: GpuServer) -> None:
    found = _only(server.paths, "GPU nodes")

    assert (found.status, found.seen[:6]) == ("ok", "8 of 8")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nvidia3", "GPU3: "),
        ("nvidiactl", "is NVIDIA's driver loaded?"),
        ("nvidia-uvm", "nvidia-modprobe -u -c 0"),
    ],
)
def test_a_missing_node_fails_with_the_gpus_that_need_it(
    server: GpuServer, name: str, words: str
) -> None:
    (server.paths.dev / name).unlink()

    bad = [each for each in _found(server.paths, "GPU nodes") if each.status == "failed"]

    assert len(bad) == 1
    assert words in bad[0].seen


def test_a_driver_that_is_not_loaded_fails_where_pools_need_it(server: GpuServer) -> None:
    server.driver.unload()

    found = _only(server.paths, "GPU nodes")

    assert found.status == "failed"
    assert "modprobe nvidia" in found.remedy


def test_gpus_of_unknown_memory_are_not_offered_and_that_fails(server: GpuServer) -> None:
    server.paths.config.write_text("gpus: [{mode: units}]")

    (found,) = _found(server.paths, "GPU nodes")

    assert found.status == "failed"
    assert "GPU0, GPU1" in found.seen
    assert "write `memory` into the pool" in found.seen


def test_gpus_that_no_pool_is_meant_to_have_are_no_problem(server: GpuServer) -> None:
    (first, *_) = servers.DGX_GPUS
    server.paths.config.write_text(f'{SLICES}    devices: ["{first}"]\n')

    found = _only(server.paths, "GPU nodes")

    assert (found.status, found.seen[:6]) == ("ok", "1 of 8")


def test_an_agent_that_does_not_see_the_hosts_processes_fails(
    server: GpuServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "sees_the_host", lambda: False)

    found = _found(server.paths, "GPU nodes")[0]
    assert (found.status, "hostPID" in found.seen) == ("failed", True)


@pytest.mark.parametrize("name", ["libpfcuda.so", "libpfnvml.so"])
def test_a_missing_library_of_containers_fails(server: GpuServer, name: str) -> None:
    (server.paths.shims / name).unlink()

    found = _found(server.paths, "GPU nodes")[0]
    assert (found.status, f"has no {name}" in found.seen) == ("failed", True)


@pytest.mark.parametrize(
    ("resource", "ids", "status"),
    [
        ("nvidia.com/gpu", [servers.gpu_uuid(0)], "failed"),
        ("nvidia.com/gpu.shared", [f"{servers.gpu_uuid(0)}::3"], "failed"),
        ("nvidia.com/gpu", ["nvidia0"], "failed"),
        ("nvidia.com/gpu", [], "ok"),  # it was removed, or all are unhealthy
        ("nvidia.com/gpu", ["GPU-99999999-1111-2222-3333-444444444444"], "ok"),
        (SLICE, [f"{servers.gpu_uuid(0)}"], "ok"),
        ("rdma/hca", ["0000:1c:00.0"], "ok"),
    ],
)
def test_a_gpu_that_another_plugin_offers_too_is_found(
    server: GpuServer, resource: str, ids: list[str], status: str
) -> None:
    server.registered(resource, ids)

    found = _only(server.paths, "GPU plugins")

    assert found.status == status
    assert status != "failed" or f"{resource} of another device plugin offers GPU0" in found.seen


def test_another_plugins_gpu_of_no_pool_of_ours_is_no_problem(server: GpuServer) -> None:
    server.paths.config.write_text(f'{SLICES}    devices: ["{servers.DGX_GPUS[1]}"]\n')
    server.registered("nvidia.com/gpu", [servers.gpu_uuid(0)])

    assert _only(server.paths, "GPU plugins").status == "ok"


def test_without_nvml_the_driver_is_a_warning(server: GpuServer, tmp_path: Path) -> None:
    node = ThisNode(server.paths, tolerant=True)
    node.driver_root = tmp_path

    checks = [each for each in doctor.CHECKS if each[0] == "GPU driver"]
    found = doctor.examine(node, checks)

    assert [each.status for each in found] == ["warning"]
    assert all(f"no libnvidia-ml.so.1 below {tmp_path}" in each.seen for each in found)


def test_containers_that_hold_a_gpu_by_the_other_plugin_are_counted(server: GpuServer) -> None:
    server.registered("nvidia.com/gpu", [servers.gpu_uuid(n) for n in range(8)])
    server.held_by_other("nvidia.com/gpu", [servers.gpu_uuid(0), servers.gpu_uuid(4)])

    assert "containers hold 2 of them by it now" in _only(server.paths, "GPU plugins").seen
