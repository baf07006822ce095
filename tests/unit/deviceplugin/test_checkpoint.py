"""The checkpoint as other programs read it: its fields, its version, and a reader's errors."""

import re
import stat
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from base.paths import Paths
from base.types import DeviceId
from deviceplugin import checkpoint
from deviceplugin.checkpoint import (
    AllocatedGPU,
    AllocatedHCA,
    AllocatedNode,
    AllocatedPort,
    AllocatedRdmaDevice,
    Allocation,
    CheckpointDamaged,
    CheckpointFile,
)
from tests.runtime import CHECKOUT

PAGE = (CHECKOUT / "docs/reference/checkpoint.md").read_text()
HCA = "0000:3b:00.0"


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(state=tmp_path)


def allocation(device_id: str = f"{HCA}-0", **fields: object) -> Allocation:
    port = AllocatedPort(
        number=1,
        link_layer="InfiniBand",
        guid="0002:c903:0000:0001",
        pkeys=(0xFFFF, 0x8001),
        netdevs=("ib0",),
        umad=AllocatedNode("/dev/infiniband/umad0", 231, 0),
    )
    rdma = AllocatedRdmaDevice(
        name="mlx5_0", uverbs=AllocatedNode("/dev/infiniband/uverbs0", 231, 192), ports=(port,)
    )
    made = Allocation(
        resource="rdma/hca",
        id=DeviceId(device_id),
        devices=(AllocatedHCA(id=HCA, address=HCA, netdevs=("ib0",), rdma=(rdma,)),),
        time="2026-01-02T03:04:05Z",
        boot_id="9b6b5c1e-0d5a-4a3f-8f0e-6d5b1b1c9d11",
    )
    return msgspec.structs.replace(made, **fields)


def write(paths: Paths, *allocations: Allocation) -> None:
    checkpoint.write(
        paths, [checkpoint.encode(allocation) for allocation in allocations], {"rdma/hca": []}
    )


def test_devices_that_several_allocations_have_are_stored_once(paths: Paths) -> None:
    renumbered = allocation(f"{HCA}-2")
    (device,) = renumbered.devices
    renumbered = msgspec.structs.replace(
        renumbered, devices=(msgspec.structs.replace(device, netdevs=("ib1",)),)
    )
    given = allocation(), allocation(f"{HCA}-1"), renumbered
    write(paths, *given)
    stored = msgspec.json.decode(paths.checkpoint.read_bytes(), type=CheckpointFile)
    assert list(stored.hcas.values()) == [device, *renumbered.devices]
    assert checkpoint.read(paths).allocations == given


def test_absent_file_is_nothing_handed_out(paths: Paths) -> None:
    assert checkpoint.read(paths).allocations == ()


def test_is_for_root_only(paths: Paths) -> None:
    write(paths, allocation())
    assert stat.S_IMODE(paths.checkpoint.stat().st_mode) == 0o600


def test_fields_of_a_later_version_are_skipped(paths: Paths) -> None:
    write(paths, allocation())
    document = msgspec.json.decode(paths.checkpoint.read_bytes())
    document["later"] = 1
    document["allocations"][0]["later"] = {"a": [1]}
    (hca,) = document["hcas"].values()
    hca["rdma"][0]["ports"][0]["later"] = None
    paths.checkpoint.write_bytes(msgspec.json.encode(document))
    assert checkpoint.read(paths).allocations == (allocation(),)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "Input data was truncated"),
        (b'{"version": 1, "allocations": [{"resource": "rdma/h', "truncated"),
        (b'{"version": 1, "allocations": [{}]}', "missing required field"),
        (
            b'{"version": 1, "hcas": {}, "allocations": [{"resource": "a/b", '
            b'"id": "0", "devices": ["x"], "time": "", "boot_id": "", "adopted": false, '
            b'"gpu": null}], "offered": {}}',
            """"hcas" has no 'x'""",
        ),
        (b'{"version": 2, "allocations": []}', "has version 2, but this podfabric reads"),
        (b'{"allocations": []}', "has version 0"),
        (b"[]", "Expected `object`"),
        (b"\xff\xfe", "invalid"),
    ],
)
def test_what_cannot_be_read_says_why_and_what_to_do(
    paths: Paths, content: bytes, why: str
) -> None:
    paths.devices.mkdir(parents=True)
    paths.checkpoint.write_bytes(content)
    with pytest.raises(CheckpointDamaged) as error:
        checkpoint.read(paths)
    text = str(error.value)
    assert text.startswith(f"{paths.checkpoint}: ")
    assert why.lower() in text.lower()
    assert "remove the file and restart the agent" in text


def test_what_a_container_has_of_a_gpu_is_kept(paths: Paths) -> None:
    given = AllocatedGPU(
        uuid="GPU-1", bdf="0000:1a:00.0", minor=0, memory_bytes=1 << 30, compute_share=0.25
    )
    kept = replace(allocation(), devices=(), gpu=given)
    write(paths, kept)
    assert checkpoint.read(paths).allocations == (kept,)


def test_reader_sees_the_old_file_or_the_new_one(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(paths, allocation())

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(paths, allocation(), allocation(f"{HCA}-1"))
    assert checkpoint.read(paths).allocations == (allocation(),)
    assert [path.name for path in paths.devices.iterdir()] == ["checkpoint.json"]


def test_example_of_the_page_is_a_checkpoint() -> None:
    (example,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    found = msgspec.json.decode(example, type=CheckpointFile)
    assert found.version == checkpoint.VERSION
    assert msgspec.json.decode(msgspec.json.encode(found)) == msgspec.json.decode(example)
    assert f"version {checkpoint.VERSION}" in PAGE
