"""The GPUs in `devices` and `explain`: holders, limits, use, distances."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from base.paths import Paths
from deviceplugin.plugin import DevicePlugin
from deviceplugin.pools.formats import load
from gpu.limits import layout
from gpu.limits.limits_file import Limit
from gpu.pools.limit_backend import GpuParts
from node import node_gpus
from node.state import ThisNode
from tests.kubelet import Kubelet
from tests.unit.cli.commands import Shell, short_path
from tests.unit.cli.gpu_server import GIB, POD_UID, SLICE, SLICES, GpuServer
from tests.unit.host import servers

pytestmark = pytest.mark.root


@pytest.fixture
def paths() -> Iterator[Paths]:
    with short_path() as directory:
        yield servers.dgx(directory, nodes=True)


@pytest.fixture
def shell(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    return Shell(paths, monkeypatch, capsys)


def _gpus(shell: Shell, *given: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = shell("devices", "--gpus", "-o", "json", *given).document()[
        "gpus"
    ]
    return found


def test_each_gpu_has_its_pool_what_is_free_and_the_distance_to_each_hca(
    paths: Paths, shell: Shell
) -> None:
    GpuServer(paths).hold(2, ["00000002.10g-25.0", "00000002.10g-25.1"])

    found = _gpus(shell)

    assert [gpu["address"] for gpu in found] == list(servers.DGX_GPUS)
    assert [gpu["fault"] for gpu in found] == [""] * 8
    third = found[2]
    assert (third["label"], third["minor"]) == ("GPU2", 2)
    (offer,) = third["offered"]
    assert (offer["resource"], offer["ids"], offer["held"]) == (SLICE, 4, 2)
    assert (third["memory_bytes"], third["free_bytes"]) == (80 * GIB, 60 * GIB)
    assert third["free_share"] == 0.5
    assert third["distances"]["mlx5_2"] == "PIX"
    assert third["distances"]["mlx5_7"] == "SYS"
    assert len(third["distances"]) == len(servers.DGX_HCAS)


def test_a_part_has_its_holder_limit_use_and_share(paths: Paths, shell: Shell) -> None:
    server = GpuServer(paths)
    group = server.hold(0, ["00000000.10g-25.0", "00000000.10g-25.1"])
    server.using(group, used_bytes=3 * GIB, peak_bytes=5 * GIB, denied=7)
    server.groups.register(group, 0, 4711, 1)

    (part,) = _gpus(shell)[0]["held"]

    assert part["container"] == {"pod": POD_UID, "name": "container-0", "uid": POD_UID}
    assert (part["resources"], len(part["ids"])) == ([SLICE], 2)
    assert (part["memory_bytes"], part["compute_share"]) == (20 * GIB, 0.5)
    use = part["use"]
    assert (use["used_bytes"], use["peak_bytes"], use["denied"]) == (3 * GIB, 5 * GIB, 7)
    assert (use["memory_bytes"], use["compute_share"]) == (20 * GIB, 0.5)
    assert use["processes"] == 1
    row = next(line for line in shell("devices").out.splitlines() if POD_UID in line).split()
    assert row[:6] == ["GPU0", POD_UID, "container-0", SLICE, "2", "20"]
    assert row[6:] == ["GiB", "3", "GiB", "5", "GiB", "50%"]


def test_a_damaged_count_of_a_tenant_is_told_and_left_as_it_is(paths: Paths, shell: Shell) -> None:
    server = GpuServer(paths)
    group = server.hold(0, ["00000000.10g-25.0"])
    region = server.groups.root / group / "region"
    for size in (layout.REGION_SIZE - 1, layout.REGION_SIZE + (1 << 20)):
        with region.open("r+b") as file:
            file.truncate(size)

        (part,) = _gpus(shell)[0]["held"]

        assert f"has {size} bytes" in part["problem"]
        assert part["use"]["used_bytes"] is None
        assert part["use"]["memory_bytes"] == 10 * GIB
        assert region.stat().st_size == size, "a command only reads"
        assert f"has {size} bytes" in shell("devices").out


def test_reading_the_use_of_parts_leaves_no_file_open(paths: Paths) -> None:
    server = GpuServer(paths)
    damaged, removed = (server.hold(0, [f"0000000{number}.10g-25.0"]) for number in range(2))
    server.hold(1, ["00000003.10g-25.0"])
    (server.groups.root / damaged / "region").write_bytes(b"x")
    (server.groups.root / removed / "limits").unlink()
    node = ThisNode(paths)
    node_gpus.listed(node)
    before = len(list(Path("/proc/self/fd").iterdir()))

    for _ in range(8):
        node_gpus.listed(node)

    assert len(list(Path("/proc/self/fd").iterdir())) <= before  # garbage may be collected


def test_replicas_of_a_gpu_have_holders_and_no_limit(paths: Paths, shell: Shell) -> None:
    name = "example.com/shared-gpu"
    server = GpuServer(paths, f"gpus: [{{mode: replicas, name: {name}, replicas: 8}}]")
    server.hold_whole(1, name, ["nvidia1-_-1"])
    server.hold_whole(1, name, ["nvidia1-_-2"])

    found = _gpus(shell)[1]

    assert found["offered"][0]["ids"] == 8
    assert (found["memory_bytes"], found["free_share"]) == (None, None)
    assert len(found["held"]) == 2
    assert all(part["use"] is None and not part["problem"] for part in found["held"])


def test_a_gpu_that_is_gone_or_lacks_its_node_says_so(paths: Paths, shell: Shell) -> None:
    server = GpuServer(paths)
    server.hold(0, ["00000009.10g-25.0"], address="0000:ff:00.0")
    (paths.dev / "nvidia3").unlink()

    found = {gpu["address"]: gpu for gpu in _gpus(shell)}

    assert not found["0000:ff:00.0"]["present"]
    assert found["0000:ff:00.0"]["fault"] == "it is not on this node now"
    assert "nvidia3: No such file" in found[servers.DGX_GPUS[3]]["fault"]
    out = shell("devices").out
    assert "nvidia3: No such file" in out
    assert "it is not on this node now" in out


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("pools: []", "no pool of GPUs is configured"),
        ('gpus: [{mode: units, memory: 8Gi, devices: ["0000:99:00.0"]}]', "no pool selects it"),
        ("gpus: [{mode: units}]", "its memory is not known"),
    ],
)
def test_why_a_gpu_is_not_offered_is_told(
    paths: Paths, shell: Shell, config: str, why: str
) -> None:
    GpuServer(paths, config)

    assert all(why in gpu["not_offered"] and not gpu["offered"] for gpu in _gpus(shell))
    assert why in shell("devices", "--gpus").out


def test_the_list_of_hcas_for_programs_has_no_gpus(paths: Paths, shell: Shell) -> None:
    GpuServer(paths)

    found = shell("devices", "-o", "json").document()

    assert tuple(device["hca"]["id"] for device in found) == servers.DGX_HCAS


@pytest.mark.parametrize("change", ["no limits", "other GPU", "short limits"])
def test_limits_that_cannot_be_read_are_a_problem_of_that_part_alone(
    paths: Paths, shell: Shell, change: str
) -> None:
    server = GpuServer(paths, SLICES)
    group = server.hold(0, ["00000000.10g-25.0"])
    server.hold(1, ["00000001.10g-25.0"])
    changes: dict[str, Callable[[], object]] = {
        "no limits": (server.groups.root / group / "limits").unlink,
        "short limits": lambda: (server.groups.root / group / "limits").write_bytes(b"x"),
        "other GPU": lambda: _of_another_gpu(server, group),
    }
    changes[change]()

    first, second = _gpus(shell)[:2]

    assert first["held"][0]["use"] is None
    assert group in first["held"][0]["problem"]
    assert second["held"][0]["use"]["memory_bytes"] == 10 * GIB


def test_a_pods_parts_are_explained_with_use_and_the_way_to_its_hca(
    paths: Paths, shell: Shell
) -> None:
    server = GpuServer(paths, f'pools: [{{name: "rdma/hca", mode: exclusive}}]\n{SLICES}')
    parts = GpuParts(groups=server.groups, obstacle=lambda: None)
    plugin = DevicePlugin(paths, load(paths.config), gpu_parts=parts)
    with Kubelet(paths.kubelet) as kubelet:
        plugin.start()
        try:
            kubelet.wait(lambda: kubelet.allocatable(SLICE) == 32)
            kubelet.wait(lambda: kubelet.allocatable("rdma/hca") == 8)
            limits = {"rdma/hca": 1, SLICE: 2}
            kubelet.admit("trainer", [{"name": "main", "limits": limits}], namespace="ml")
            (group,) = server.groups.names()
            server.using(group, used_bytes=GIB, peak_bytes=2 * GIB)
            kubelet.admit("server", [{"name": "main", "limits": {SLICE: 1}}], namespace="ml")
            (other,) = set(server.groups.names()) - {group}
            server.using(other, used_bytes=8 * GIB, peak_bytes=9 * GIB)
            (paths.dev / "nvidia1").unlink()
            shell.as_kept("podfabric devices --gpus")
            found = shell("explain", "ml/trainer", "-o", "json").document()
            out = shell("explain", "ml/trainer").out
            everyone = shell("devices", "--gpus").out
        finally:
            plugin.close()
    (part,) = found["gpus"]
    assert part["container"] == {
        "pod": "ml/trainer",
        "name": "main",
        "uid": "uid-of-ml-trainer",
    }
    assert (part["memory_bytes"], part["compute_share"]) == (20 * GIB, 0.5)
    assert part["use"]["used_bytes"] == GIB
    assert found["ways"][0]["gpu"].endswith(part["gpu"])
    assert found["notes"] == []
    row = next(line for line in out.splitlines() if line.endswith("50%")).split()
    assert row[0] == "main"
    assert row[2:6] == [SLICE, "2", "20", "GiB"]
    assert "ml/trainer" in everyone, "the kubelet's PodResources has names of pods"


def _of_another_gpu(server: GpuServer, group: str) -> None:
    server.groups.remove(group)
    server.groups.make(group, Limit(servers.gpu_uuid(7), 10 * GIB, 0.25))


def test_a_gpu_whose_limits_cannot_be_kept_says_why(paths: Paths, shell: Shell) -> None:
    GpuServer(paths)
    (paths.shims / "libpfcuda.so").unlink()
    why = f"the node cannot enforce its limits: {paths.shims} has no libpfcuda.so"

    assert all(why in gpu["fault"] for gpu in _gpus(shell))
    assert why in shell("devices").out
