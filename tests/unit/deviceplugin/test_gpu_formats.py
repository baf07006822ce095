"""Pools of GPUs in config.yaml: what is read, and what is an error."""

from pathlib import Path

import pytest

from deviceplugin.pools.formats import parse
from deviceplugin.pools.pool_config import ConfigError
from gpu import gpu_pool_keys
from gpu.driver.driver_files import SharedFile
from gpu.gpu_pool import GpuPoolConfig, Shape


def gpus(text: str) -> tuple[GpuPoolConfig, ...]:
    return parse(f"pools: []\ngpus: {text}".encode(), "config.yaml").gpus


def test_replicas_are_read() -> None:
    (pool,) = gpus(
        "[{mode: replicas, name: example.com/shared-gpu, replicas: 4,"
        ' devices: ["1A:00.0"], driverMount: {host: /opt/nvidia/, container: /usr/local/nvidia}}]'
    )
    assert pool == GpuPoolConfig(
        mode="replicas",
        resource="example.com/shared-gpu",
        replicas=4,
        placement="spread",
        devices=("0000:1a:00.0",),
        driver_mount=SharedFile("/opt/nvidia", "/usr/local/nvidia"),
    )
    assert pool.resources == ("example.com/shared-gpu",)


def test_file_without_the_key_has_no_pool_of_gpus() -> None:
    assert parse(b"pools: []", "config.yaml").gpus == ()
    assert gpus("") == ()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{}", "gpus: expected a list of pools"),
        ("[{mode: replicas}]", r"gpus\[0\].name: is required in mode replicas"),
        ("[{mode: replicas, name: a/b}]", r"gpus\[0\].replicas: is required in mode replicas"),
        ("[{mode: replicas, name: b, replicas: 1}]", "write domain/name"),
        ("[{mode: replicas, name: a/b, replicas: 0}]", r"gpus\[0\].replicas: 0"),
        ("[{mode: replicas, name: a/b, replicas: 1, unit: 1Gi}]", "is for mode units"),
        ("[{mode: replicas, name: a/b, replicas: 1, replica: 1}]", 'did you mean "replicas"'),
        ("[{mode: replicas, name: a/b, replicas: 1, devices: [gpu0]}]", "neither the PCI address"),
        (
            "[{mode: replicas, name: a/b, replicas: 1, driverMount: {host: x, container: /y}}]",
            r"gpus\[0\].driverMount.host: 'x'",
        ),
        (
            "[{mode: replicas, name: a/b, replicas: 1, driverMount: {host: /x/../y}}]",
            r"driverMount.host: '/x/../y'",
        ),
        (
            "[{mode: replicas, name: a/b, replicas: 1}, {mode: replicas, name: a/b, replicas: 2}]",
            "a/b: two pools have this resource",
        ),
    ],
)
def test_mistake_is_an_error_that_names_the_key(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        gpus(text)


def test_resource_of_hcas_is_not_taken_again() -> None:
    with pytest.raises(ConfigError, match="rdma/hca: two pools have this resource"):
        parse(b"gpus: [{mode: replicas, name: rdma/hca, replicas: 2}]", "config.yaml")


def test_slices_are_the_default_mode() -> None:
    (pool,) = gpus(
        "[{shapes: [{name: a.io/gpu-10g-25, memory: 10Gi, compute: 25},"
        " {name: a.io/gpu-512m-1, memory: 512Mi, compute: 1}], reserve: 1Gi, placement: spread}]"
    )
    assert pool == GpuPoolConfig(
        mode="slices",
        shapes=(
            Shape(resource="a.io/gpu-10g-25", memory=10 << 30, compute=25),
            Shape(resource="a.io/gpu-512m-1", memory=512 << 20, compute=1),
        ),
        reserve=1 << 30,
        placement="spread",
    )
    assert pool.resources == ("a.io/gpu-10g-25", "a.io/gpu-512m-1")


def test_units_have_alnairs_names() -> None:
    (pool,) = gpus("[{mode: units}]")
    assert pool.resources == ("alnair/vgpu-memory", "alnair/vgpu-compute")
    assert pool.unit == 1 << 30
    (other,) = gpus("[{mode: units, memoryName: a/m, computeName: a/c, unit: 2Gi, memory: 80Gi}]")
    assert (other.resources, other.unit, other.memory) == (("a/m", "a/c"), 2 << 30, 80 << 30)


def test_every_key_is_in_the_document() -> None:
    table = (Path(__file__).parents[3] / "docs/use/gpus.md").read_text()
    assert [key for key in gpu_pool_keys.KEYS if f"| `{key}` |" not in table] == []


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[{}]", r"gpus\[0\].shapes: is required in mode slices"),
        ("[{shapes: [{name: a/b, memory: 1Gi}]}]", r"shapes\[0\].compute: is required"),
        ("[{shapes: [{name: a/b, memory: 1Gi, compute: 101}]}]", r"shapes\[0\].compute: 101"),
        (
            "[{shapes: [{name: a/b, memory: 1GB, compute: 1}]}]",
            "expected a number of bytes, such as",
        ),
        (
            "[{mode: units, unit: 1Mi}]",
            "would have 81920 ids, but a kubelet accepts at most 52428 ids",
        ),
        ("[{mode: units, name: a/b}]", "is for mode replicas, but this pool has mode units"),
        (
            "[{driverMount: {}, shapes: [{name: a/b, memory: 1Gi, compute: 1}]}]",
            r"gpus\[0\].driverMount: is for mode replicas, but this pool has mode slices",
        ),
        ("[{mode: units, memory: true}]", "gpus.0..memory: True: expected a number of bytes"),
        ("[{mode: units, memoryName: a/b, computeName: a/b}]", "a/b: two pools have this resource"),
    ],
)
def test_mistake_in_shares_is_an_error_that_names_the_key(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        gpus(text)
