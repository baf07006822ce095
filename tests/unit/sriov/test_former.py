"""Files of sriov-cni and ib-sriov-cni become the journal's entries; DELs are in tests/kernel."""

import os
from typing import Any

import msgspec
import pytest

from cni.attachments.journal import Journal, JournalEntry
from cni.spec.attachment import Attachment
from cni.spec.notes import collected
from cni.spec.request import Request
from cni.sriov import sriov_cni
from cni.sriov.device_record import DeviceRecord
from tests.capabilities import without_dac_override
from tests.unit.sriov.node import VF0, Node, vf

ATTACHMENT = Attachment("fabric", "c1", "net1")
STATE = {"HostIFName": "enp175s6", "AdminMAC": "02:11:22:33:aa:bb", "Trust": True, "LinkState": 9}
WRITTEN: dict[str, Any] = {"deviceID": VF0, "OrigVfState": STATE}


def _adopted(node: Node, content: bytes, *, modified: float | None = None) -> JournalEntry | None:
    node.paths = msgspec.structs.replace(node.paths, cni_state=node.paths.run.parent / "cni")
    file = node.paths.cni_state / "sriov/c1-net1"
    (file.parent / "pci").mkdir(parents=True)
    file.write_bytes(content)
    (file.parent / "pci" / VF0).touch()
    for directory in (file.parent / "pci", file.parent):  # as sriov-cni makes them
        directory.chmod(0o600)
    if modified is not None:
        os.utime(file, (modified, modified))
    journal = Journal(node.paths)
    request = Request(command="DEL", container_id="c1", ifname="net1", network="fabric")
    entry = sriov_cni.adopt(journal, node.paths, ATTACHMENT, request)
    assert journal.read(ATTACHMENT) == entry
    return entry


def test_setting_that_the_driver_does_not_report_gets_no_value_from_the_file(
    ethernet: Node,
) -> None:
    """Go's netlink takes "not reported" for a value: a VF that must not be trusted would be."""
    ethernet.vfs[0] = vf(0, trust=None, link_state=None, vlan=5)
    configured = {"trust": "on", "spoofchk": "banana", "link_state": "enable", "vlan": 5}
    entry = _adopted(ethernet, msgspec.json.encode(WRITTEN | configured))
    assert entry is not None
    record = entry.undo_as(DeviceRecord)
    assert record.before is not None and record.applied is not None
    assert (record.before.trust, record.before.link_state) == (None, None)
    applied = record.applied
    assert (applied.trust, applied.spoofchk, applied.link_state) == (True, True, "enable")
    assert (entry.device, record.before.vlan, applied.vlan) == (VF0, 0, 5)


def test_agent_of_the_chart_finds_and_removes_the_files(ethernet: Node) -> None:
    with without_dac_override():
        assert _adopted(ethernet, msgspec.json.encode(WRITTEN)) is not None
        sriov_cni.forget(ethernet.paths, ATTACHMENT, VF0)
    assert [path.name for path in (ethernet.paths.cni_state / "sriov").rglob("*")] == ["pci"]


@pytest.mark.root
def test_file_of_an_earlier_boot_restores_nothing(ethernet: Node) -> None:
    assert _adopted(ethernet, msgspec.json.encode(WRITTEN), modified=1.0) is None
    assert not (ethernet.paths.cni_state / "sriov/c1-net1").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[" * 9000, b'{"deviceID": 7}', b'{"deviceID": "../x"}', b"\xff"],
)
def test_file_that_cannot_be_read_is_named_and_stays(ethernet: Node, content: bytes) -> None:
    with collected() as notes:
        assert _adopted(ethernet, content) is None
    assert "cni/sriov/c1-net1 cannot be read" in notes.text
    assert (ethernet.paths.cni_state / "sriov/c1-net1").exists()
