"""RDMA devices that a restoration counts as gone, and as moving."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from base.paths import Paths
from cni.sriov import rdma_devices
from cni.sriov.device_record import DeviceRecord, MovedRdmaDevice
from host.netlink import rdma
from host.netlink.rdma import NetlinkRdmaDevice
from host.sysfs import pci

MOVED = MovedRdmaDevice(index=4, name="mlx5_7")
RECORD = DeviceRecord(device="0000:af:06.0", driver="mlx5_core", rdma=(MOVED,))


class Host:
    """A host with one RDMA device; `uverbs` are the names that its looks at sysfs have."""

    def __init__(self, uverbs: list[tuple[str, ...]]) -> None:
        self.uverbs = uverbs
        self.renamed: list[tuple[int, str]] = []

    def rdma_of(self, _paths: Paths, _address: str) -> tuple[str, ...]:
        return self.uverbs.pop(0) if len(self.uverbs) > 1 else self.uverbs[0]

    def devices(self, _socket: object) -> list[NetlinkRdmaDevice]:
        return [NetlinkRdmaDevice(index=4, name="roce_pod", node_guid="", protocol="roce")]

    def rename(self, _socket: object, device: NetlinkRdmaDevice, name: str) -> None:
        self.renamed.append((device.index, name))


def restored(host: Host, monkeypatch: pytest.MonkeyPatch, seconds: float) -> bool:
    monkeypatch.setattr(pci, "rdma_of", host.rdma_of)
    for name in ("devices", "rename"):
        monkeypatch.setattr(rdma, name, getattr(host, name))
    return rdma_devices.restore(Paths(sys=Path("/none")), RECORD, (), seconds)


@pytest.fixture(autouse=True)
def no_netlink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "rdma", nullcontext)


def test_device_on_its_way_back_is_waited_for_and_gets_its_name_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it moves it has no uverbs device, as if its driver had been unloaded."""
    host = Host([(), (), ("roce_pod",)])
    assert restored(host, monkeypatch, 60.0)
    assert host.renamed == [(4, "mlx5_7")]


def test_device_of_an_unloaded_driver_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host([()])
    assert restored(host, monkeypatch, 0.05)
    assert host.renamed == []


def test_device_that_does_not_come_back_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host([("mlx5_9",)])
    assert not restored(host, monkeypatch, 0.05)
