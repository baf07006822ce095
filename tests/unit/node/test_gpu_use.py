"""The parts of GPUs in the FabricNode, on the page and in `status`: limits, use and throttling."""

from collections.abc import Iterator

import msgspec
import pytest

from base.paths import Paths
from node import fabric_node, observation, usage
from node.fabric_node import (
    AttachmentStatus,
    FabricNodeStatus,
)
from node.page import html_page
from node.state import ThisNode
from node.usage import GpuPartStatus
from tests.unit.cli.commands import Shell, short_path
from tests.unit.cli.gpu_server import GIB, POD_UID, SLICE, GpuServer
from tests.unit.host import servers
from tests.unit.node.test_fabric_node import NODE

pytestmark = pytest.mark.root

MIB = 1 << 20
SECOND = 10**9
ID = "00000000.10g-25.0"


@pytest.fixture
def paths() -> Iterator[Paths]:
    with short_path() as directory:
        yield servers.dgx(directory, nodes=True)


def parts(paths: Paths) -> tuple[GpuPartStatus, ...]:
    return usage.measured(ThisNode(paths, tolerant=True)).gpu_parts


def test_a_part_has_its_limits_and_its_rounded_use(paths: Paths) -> None:
    server = GpuServer(paths)
    group = server.hold(0, [ID])
    for used, waited in ((3 * MIB, 7 * SECOND), (4 * MIB - 1, 8 * SECOND - 1)):
        server.using(group, used_bytes=used, wait_ns=waited)
        (part,) = parts(paths)
        assert (part.pod, part.container) == (POD_UID, "container-0")
        assert (part.memory_bytes, part.percent) == (10 * GIB, 25)
        assert (part.used_bytes, part.waited_seconds) == (3 * MIB, 7)


def test_a_damaged_region_leaves_the_limits_and_the_other_parts(paths: Paths) -> None:
    server = GpuServer(paths)
    damaged = server.hold(0, [ID])
    server.hold(1, ["00000001.10g-25.0"])
    (server.groups.root / damaged / "region").write_bytes(b"x")
    first, second = parts(paths)
    assert (first.memory_bytes, first.used_bytes, first.waited_seconds) == (10 * GIB, None, None)
    assert second.used_bytes == 0


def test_a_replica_has_no_limit_and_no_use(paths: Paths) -> None:
    name = "example.com/shared-gpu"
    server = GpuServer(paths, f"gpus: [{{mode: replicas, name: {name}, replicas: 8}}]")
    server.hold_whole(1, name, ["nvidia1-_-1"])
    assert parts(paths) == (
        GpuPartStatus(gpu=servers.DGX_GPUS[1], pod=POD_UID, container="container-0"),
    )


def test_a_pool_of_gpus_is_listed_with_its_use_and_faults(paths: Paths) -> None:
    server = GpuServer(paths)
    server.hold(0, [ID])
    (paths.dev / "nvidia1").unlink()
    (pool,) = (
        each
        for each in observation.observed(ThisNode(paths, tolerant=True), {}, "1.2.3").pools
        if each.resource == SLICE
    )
    assert (pool.ids, pool.held, pool.withheld) == (8 * 4, 1, 4)
    (reason,) = pool.reasons
    assert reason.startswith(servers.DGX_GPUS[1])


def test_the_page_and_status_show_each_part(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = GpuServer(paths)
    server.using(server.hold(0, [ID]), used_bytes=3 * GIB, wait_ns=7 * SECOND)
    node = ThisNode(paths, tolerant=True)
    status = fabric_node.with_usage(observation.observed(node, {}, "1.2.3"), usage.measured(node))
    cells = (servers.DGX_GPUS[0], POD_UID, "container-0", "10 GiB", "3 GiB", "25 %", "7 s")
    page = html_page.document([(NODE, status)]).decode()
    assert "".join(f"<td>{cell}</td>" for cell in cells) in page
    lines = Shell(paths, monkeypatch, capsys)("status").out.splitlines()
    assert " ".join(cells) in {" ".join(line.split()) for line in lines}


def test_parts_are_left_out_before_attachments() -> None:
    part = GpuPartStatus(gpu="0000:1a:00.0", pod="ml/" + "n" * 200)
    attachments = (AttachmentStatus(pod="ml/worker-0", interface="net1"),) * 100
    status = fabric_node.fitted(FabricNodeStatus(gpu_parts=(part,) * 256, attachments=attachments))
    assert status.attachments == attachments
    assert status.left_out == f"{256 - len(status.gpu_parts)} of 256 gpu parts"
    assert len(msgspec.json.encode(status)) <= fabric_node.MOST_BYTES
