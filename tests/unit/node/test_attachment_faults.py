"""A partition that the subnet manager takes away is a fault of the attachments that use it."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent import node_report
from agent.node_report import NodeReport
from base.paths import Paths
from base.pod import Pod
from deviceplugin.health import NOTICE, SETTLE
from node.attachment_faults import AttachmentHealth
from node.fabric_node import FabricNodeStatus, FaultStatus
from node.page import html_page
from node.state import ThisNode
from tests.unit.cli.commands import Shell, short_path
from tests.unit.host import servers
from tests.unit.host.sysfs import Tree
from tests.unit.node.test_fabric_node import attach

FIRST = servers.DGX_HCAS[0]
LOST = "the P_Key table of mlx5_0/1 no longer has P_Key 0x8001 of net1 of ml/worker-0"


@pytest.fixture
def paths() -> Iterator[Paths]:
    """A server whose pod worker-0 is on ib0, and worker-1 on ib1, both in partition 0x8001."""
    with short_path() as root:
        made = servers.dgx(root)
        made.config.parent.mkdir(parents=True, exist_ok=True)
        made.config.write_text('pools: [{name: "rdma/hca", mode: exclusive}]')
        attach(made, "worker-0")
        attach(made, "worker-1", "ib1")
        yield made


def table(paths: Paths, *pkeys: int, rdma: str = "mlx5_0") -> Path:
    return Tree(paths.sys, paths).port(rdma, 1, guid=servers.port_guid(int(rdma[5:])), pkeys=pkeys)


def found(health: AttachmentHealth, paths: Paths) -> list[tuple[str, str]]:
    return health.look(ThisNode(paths, tolerant=True))


def test_a_lost_p_key_is_noticed_told_to_its_pod_and_forgotten_when_it_is_back(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, told = [time.monotonic()], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    writer = NodeReport(paths, dict, lambda *event: told.append(event), {})

    def faults(after: float) -> list[FaultStatus]:
        now[0] += after
        writer.step()
        ((_, status),) = writer.feed.nodes()
        return [replace(fault, since="") for fault in status.faults]

    assert faults(0.0) == []
    table(paths, 0xFFFF, 0)
    assert faults(node_report.RATES_EVERY) == []  # the fault is too new
    assert faults(NOTICE) == [FaultStatus(about=FIRST, text=LOST)]
    table(paths, 0xFFFF, 0x8001)
    assert len(faults(node_report.RATES_EVERY)) == 1  # its end is too new
    assert faults(SETTLE) == []
    text = f"an interface of the pod has a fault: {LOST}"
    assert told == [(node_report.FAULT, text, Pod("ml", "worker-0"))]


@pytest.mark.parametrize("uncertain", ["unreadable", "down"])
def test_an_uncertain_table_is_no_fault_and_hides_no_other(paths: Paths, uncertain: str) -> None:
    port = table(paths, 0xFFFF, 0)
    table(paths, 0xFFFF, 0, rdma="mlx5_1")
    if uncertain == "down":
        (port / "state").write_text("2: INIT\n")
    else:
        (port / "pkeys/1").unlink()
        (port / "pkeys/1").mkdir()  # a read fails with EISDIR
    ((hca, text),) = found(AttachmentHealth(), paths)
    assert (hca, "mlx5_1/1" in text, "worker-1" in text) == (servers.DGX_HCAS[1], True, True)


def test_only_files_of_attachments_are_read_again(paths: Paths) -> None:
    health = AttachmentHealth()
    found(health, paths)
    assert not health.differs(paths)
    table(paths, 0xFFFF, 0x8001, 0x8002)  # the search has ended earlier
    table(paths, 0x7FFF, rdma="mlx5_2")
    Tree(paths.sys, paths).write("class/net/ib2/mtu", "1500")
    assert not health.differs(paths)
    table(paths, 0xFFFF, 0, rdma="mlx5_1")
    assert health.differs(paths)


def test_the_command_and_the_page_show_the_fault(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table(paths, 0xFFFF, 0)
    assert Shell(paths, monkeypatch, capsys)("status", "-o", "json").document()["faults"] == [
        {"about": FIRST, "text": LOST}
    ]
    for text, cure in (
        (LOST, b"Add the port's GUID to the partition"),
        ("ib0 has MTU 2044, less than the MTU 4092 of net1 of a/b", b"Raise the lower MTU"),
    ):
        status = FabricNodeStatus(faults=(FaultStatus(about=FIRST, text=text),))
        assert cure in html_page.document([("node-a", status)], "")
