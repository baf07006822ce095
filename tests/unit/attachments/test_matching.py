"""Attachments of a pod that choose at the same time, and where the choice is shown."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from filelock import FileLock

from base import interrupts
from cni.attachments.pod_choices import lock_of
from cni.attachments.results import uverbs_of, write_device_information
from cni.spec.notes import collected
from cni.spec.result import Interface
from tests.unit.attachments.choosing import POD, ipoib, request
from tests.unit.deviceplugin.holding import Holding
from tests.unit.host import servers
from tests.waiting import PATIENCE

A, VF = servers.DGX_HCAS[0], servers.VFS_ETHERNET[0]


def test_attachments_at_once_are_on_different_hcas(server: Holding) -> None:
    server.give(POD, {"0": servers.DGX_HCAS})
    with ThreadPoolExecutor(8) as pool:
        chosen = list(pool.map(lambda n: ipoib(server, f"net{n}"), range(8)))
    assert sorted(chosen) == [f"ib{n}" for n in range(8)]
    assert list(server.paths.locks.iterdir()) == []


def test_attachment_that_waits_for_another_of_its_pod_can_be_cancelled(server: Holding) -> None:
    server.give(POD, {f"{A}-0": [A]})
    call = interrupts.Call(endable=True)

    def waiting() -> str:
        with interrupts.serving(call):
            return ipoib(server)

    with (
        FileLock(_made(lock_of(server.paths, POD))),
        ThreadPoolExecutor(1) as pool,
    ):
        choosing = pool.submit(waiting)
        call.end()
        with pytest.raises(interrupts.Terminated):
            choosing.result(PATIENCE)


def _made(lock: Path) -> Path:
    lock.parent.mkdir(parents=True)
    return lock


def test_verbs_device_is_told_in_multus_file(card: Holding, tmp_path: Path) -> None:
    paths = msgspec.structs.replace(card.paths, devinfo=tmp_path)
    file = tmp_path / "cni/ml-fabric-c1_net1"
    file.parent.mkdir()
    file.write_text(json.dumps({"type": "pci", "version": "1.1.0", "pci": {"pci-address": VF}}))
    assert uverbs_of(card.paths, ["mlx5_6"]) == ("mlx5_6", "uverbs6")
    assert uverbs_of(card.paths, ["mlx5_99"]) == ("", "")
    interface = Interface(name="net1", pciID=VF, rdmaDevice="mlx5_6", uverbs="uverbs6")
    write_device_information(
        paths, request(runtimeConfig={"CNIDeviceInfoFile": str(file)}), interface
    )
    written = json.loads(file.read_bytes())
    assert written["pci"] == {"pci-address": VF, "rdma-device": "mlx5_6"}
    assert written["podfabric"] == {"uverbs": "uverbs6", "major": 231, "minor": 198}


def test_multus_file_that_cannot_be_written_is_a_note(card: Holding, tmp_path: Path) -> None:
    interface = Interface(name="net1", pciID=VF, rdmaDevice="mlx5_6", uverbs="uverbs6")
    paths = msgspec.structs.replace(card.paths, devinfo=tmp_path)
    (tmp_path / "cni").write_text("")
    with collected() as notes:
        path = str(tmp_path / "cni/ml-fabric-c1_net1")
        write_device_information(
            paths, request(runtimeConfig={"CNIDeviceInfoFile": path}), interface
        )
        gone = msgspec.structs.replace(interface, rdmaDevice="mlx5_99")
        write_device_information(paths, request(runtimeConfig={"CNIDeviceInfoFile": path}), gone)
        write_device_information(paths, request(runtimeConfig=5), interface)
    assert notes.text.count(f"device information {path}: ") == 2
