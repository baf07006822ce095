"""GPUs from an artificial /proc/driver/nvidia, and their ids in other device plugins."""

from pathlib import Path

import pytest

from base.paths import Paths
from host.sysfs.gpus import GPUs, address_of, gpus
from tests.unit.host import servers
from tests.unit.host.servers import DGX_GPUS, gpu_uuid
from tests.unit.host.sysfs import Tree

GPU_5 = gpu_uuid(5)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    return servers.dgx(tmp_path_factory.mktemp("dgx"))


def _information(paths: Paths, directory: str, *lines: str) -> None:
    file = paths.proc / "driver/nvidia/gpus" / directory / "information"
    file.parent.mkdir(parents=True)
    file.write_text("".join(f"{line}\n" for line in lines))


def test_every_gpu_is_found_with_uuid_minor_and_numa_node(paths: Paths) -> None:
    listed = gpus(paths)
    assert tuple(gpu.address for gpu in listed) == DGX_GPUS
    assert [gpu.uuid for gpu in listed] == [gpu_uuid(n) for n in range(8)]
    assert [gpu.minor for gpu in listed] == list(range(8))
    assert [gpu.numa for gpu in listed] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_node_without_the_driver_has_no_gpus(tmp_path: Path) -> None:
    assert gpus(Paths(proc=tmp_path)) == []


def test_broken_gpu_hides_no_other(tmp_path: Path) -> None:
    paths = Paths(proc=tmp_path / "proc", sys=tmp_path / "sys")
    Tree(paths.sys, paths).pf("0000:1a:00.0", driver="nvidia", numa=-1)
    _information(
        paths, "0000:1a:00.0", f"GPU UUID: \t {GPU_5}", "Bus Location: \t 0000:1A:00.0", "x"
    )
    unset = "GPU UUID: \t GPU-????????-????-????-????-????????????"
    _information(paths, "0000:1b:00.0", unset, "Device Minor: \t 1")
    _information(paths, "nonsense", "Device Minor: \t 2")
    (paths.proc / "driver/nvidia/gpus/0000:1c:00.0/information").mkdir(parents=True)
    listed = [(gpu.address, gpu.uuid, gpu.minor, gpu.numa) for gpu in gpus(paths)]
    assert listed == [
        ("0000:1a:00.0", GPU_5, None, None),
        ("0000:1b:00.0", "", 1, None),
        ("0000:1c:00.0", "", None, None),
    ]


@pytest.mark.parametrize(
    "device_id",
    [
        GPU_5,
        GPU_5.upper(),
        f"{GPU_5}::0",
        f"{GPU_5}::17",
        f"{GPU_5}_3",
        f"{GPU_5}-3",
        f"MIG-{GPU_5}/1/0",
        f"MIG-{GPU_5}/1/0::2",
        "nvidia5",
        "nvidia5/gi1",
        "nvidia5/vgpu3",
        "nvidia5/gi1/vgpu0",
        "nvidia5-_-7",
    ],
)
def test_id_of_a_device_plugin_means_a_gpu(paths: Paths, device_id: str) -> None:
    assert address_of(gpus(paths), device_id) == DGX_GPUS[5]


@pytest.mark.parametrize(
    "device_id",
    [
        "",
        gpu_uuid(8),
        f"{GPU_5}0",
        f"{GPU_5}::",
        f"{GPU_5}::x",
        "MIG-0a1b2c3d-1111-2222-3333-444455556666",
        "nvidia8",
        "nvidia",
        "nvidia5x",
        "nvidia5/gi1/other",
        "5",
        "0000:1a:00.0",
    ],
)
def test_unknown_id_is_no_gpu(paths: Paths, device_id: str) -> None:
    assert address_of(gpus(paths), device_id) == ""


def test_gpus_are_read_again_if_one_is_added_or_was_not_set_up(tmp_path: Path) -> None:
    paths = Paths(proc=tmp_path / "proc", sys=tmp_path / "sys")
    kept = GPUs(paths)
    assert kept.read() == []
    _information(paths, "0000:1a:00.0", "GPU UUID: \t GPU-????????-????-????-????-????????????")
    assert [gpu.uuid for gpu in kept.read()] == [""]
    file = paths.proc / "driver/nvidia/gpus/0000:1a:00.0/information"
    file.write_text(f"GPU UUID: \t {GPU_5}\n")
    assert [gpu.uuid for gpu in kept.read()] == [GPU_5]
    _information(paths, "0000:1b:00.0", f"GPU UUID: \t {gpu_uuid(6)}")
    assert [gpu.uuid for gpu in kept.read()] == [GPU_5, gpu_uuid(6)]
    file.unlink()
    assert kept.read()[0].uuid == GPU_5  # the same GPUs: not read again
