"""`runtimeConfig.CNIDeviceInfoFile` in a definition: another attachment's file is left alone."""

import json
from pathlib import Path

import msgspec
import pytest

from cni.attachments.results import write_device_information
from cni.spec.notes import collected
from cni.spec.result import Interface
from tests.unit.attachments.choosing import request
from tests.unit.attachments.conftest import card, root
from tests.unit.deviceplugin.holding import Holding
from tests.unit.host import servers

__all__ = ["card", "root"]

VF = servers.VFS_ETHERNET[0]

COPY = {"type": "pci", "version": "1.1.0", "pci": {"pci-address": "0000:01:00.1"}}


@pytest.mark.parametrize("name", ["ml-fabric-c2_net1", "ml-fabric-c1_net2", "c1_net1x"])
def test_the_file_of_another_attachment_is_left_alone(
    card: Holding, tmp_path: Path, name: str
) -> None:
    paths = msgspec.structs.replace(card.paths, devinfo=tmp_path)
    theirs = tmp_path / "cni" / name
    theirs.parent.mkdir()
    theirs.write_text(json.dumps(COPY))
    interface = Interface(name="net1", pciID=VF, rdmaDevice="mlx5_6", uverbs="uverbs6")
    with collected() as notes:
        write_device_information(
            paths, request(runtimeConfig={"CNIDeviceInfoFile": str(theirs)}), interface
        )
    assert json.loads(theirs.read_bytes()) == COPY
    assert "it is not this attachment's" in notes.text
