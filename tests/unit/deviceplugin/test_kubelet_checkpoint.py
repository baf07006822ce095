"""The kubelet's checkpoint, as it writes it and damaged."""

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from base.paths import Paths
from base.types import DeviceId
from deviceplugin.api.v1beta1_pb2 import ContainerAllocateResponse
from deviceplugin.kubelet import records
from deviceplugin.kubelet.records import KubeletUnreadable, PodDevices


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    """An empty device-plugins directory."""
    paths = Paths(kubelet=tmp_path)
    paths.device_plugins.mkdir()
    return paths


def put(paths: Paths, content: object) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (paths.device_plugins / "kubelet_internal_checkpoint").write_text(text)


def entry(ids: object, **other: object) -> dict[str, Any]:
    return {
        "PodUID": "970a395d",
        "ContainerName": "appcntr1",
        "ResourceName": "intel.com/sriov_net_A",
        "DeviceIDs": ids,
        "AllocResp": "CikK",
        **other,
    }


def whole(*entries: dict[str, Any], **other: object) -> dict[str, Any]:
    data = {"PodDeviceEntries": list(entries), "RegisteredDevices": {}}
    return {"Data": data, "Checksum": 229855270, **other}


@pytest.mark.parametrize(
    ("listed", "ids"),
    [
        ({"0": ["0000:03:02.3", "0000:03:02.0"]}, ("0000:03:02.0", "0000:03:02.3")),
        ({"-1": ["5"]}, ("5",)),
        ({"0": ["a"], "1": ["a", "b"]}, ("a", "b")),
        ({"0": None, "1": ["a"]}, ("a",)),
        (None, ()),
    ],
)
def test_every_id_is_there_once(paths: Paths, listed: object, ids: tuple[str, ...]) -> None:
    put(paths, whole(entry(listed), BootID="11-22"))
    assert records.from_checkpoint(paths) == [
        PodDevices(
            namespace="",
            name="",
            uid="970a395d",
            container="appcntr1",
            resource="intel.com/sriov_net_A",
            ids=tuple(map(DeviceId, ids)),
        )
    ]


@pytest.mark.parametrize(
    ("given", "nodes"),
    [
        (["/dev/infiniband/uverbs10", "/dev/infiniband/uverbs2"], ("uverbs2", "uverbs10")),
        (["/host/dev/infiniband/uverbs3", "/dev/infiniband/rdma_cm"], ("uverbs3",)),
        (["/dev/vfio/7", "/dev/infiniband/umad0", "/dev/infiniband/uverbs"], ()),
        ([], ()),
    ],
)
def test_verbs_devices_that_were_given_are_told_if_they_are_asked_for(
    paths: Paths, given: list[str], nodes: tuple[str, ...]
) -> None:
    response = ContainerAllocateResponse(
        envs={"A": "1"}, devices=[{"host_path": entry, "container_path": "/x"} for entry in given]
    )
    encoded = base64.b64encode(response.SerializeToString()).decode()
    put(paths, whole(entry({"-1": ["a"]}, AllocResp=encoded)))
    assert [row.nodes for row in records.from_checkpoint(paths, nodes=True)] == [nodes]
    assert [row.nodes for row in records.from_checkpoint(paths)] == [()]


@pytest.mark.parametrize("response", [None, "", "!", "CikK", "/////w=="])
def test_answer_that_cannot_be_read_tells_no_verbs_device(
    paths: Paths, response: str | None
) -> None:
    put(paths, whole(entry({"-1": ["a"]}, AllocResp=response)))
    assert [(row.ids, row.nodes) for row in records.from_checkpoint(paths, nodes=True)] == [
        (("a",), ())
    ]


def test_the_order_is_not_that_of_the_file(paths: Paths) -> None:
    entries = [
        entry({"-1": ["1"]}, ContainerName="b"),
        entry({"-1": ["2"]}, ContainerName="a", ResourceName="rdma/z"),
        entry({"-1": ["3"]}, ContainerName="a", ResourceName="rdma/a"),
    ]
    put(paths, whole(*entries))
    forwards = records.from_checkpoint(paths)
    put(paths, whole(*reversed(entries)))
    assert records.from_checkpoint(paths) == forwards
    assert [row.ids for row in forwards] == [("3",), ("2",), ("1",)]


@pytest.mark.parametrize("content", [None, whole(), {"Data": {"PodDeviceEntries": None}}])
def test_a_kubelet_that_gave_nothing_away_is_no_error(paths: Paths, content: object) -> None:
    if content is not None:
        put(paths, content)
    assert records.from_checkpoint(paths) == []
    assert not records.registered(paths)


def test_the_resources_that_were_registered_are_known(paths: Paths) -> None:
    data = {"PodDeviceEntries": None, "RegisteredDevices": {"rdma/hca": ["b", "a"], "a/b": None}}
    put(paths, {"Data": data, "Checksum": 0})
    assert records.registered(paths) == {"rdma/hca": ["a", "b"], "a/b": []}


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "\x00\x01", {"Checksum": 1}, {"Data": {"PodDeviceEntries": [{}]}}]
)
def test_a_damaged_file_is_named_with_what_to_do(paths: Paths, content: object) -> None:
    put(paths, content)
    for read in (records.from_checkpoint, records.registered):
        with pytest.raises(
            KubeletUnreadable, match="kubelet_internal_checkpoint: is not a valid checkpoint"
        ):
            read(paths)


def test_a_file_that_may_not_be_read_is_named(paths: Paths) -> None:
    (paths.device_plugins / "kubelet_internal_checkpoint").mkdir()
    with pytest.raises(KubeletUnreadable, match="cannot be read: Is a directory"):
        records.from_checkpoint(paths)


def test_plugins_that_read_the_checkpoint_import_no_grpc_and_no_yaml(paths: Paths) -> None:
    put(paths, whole(entry({"-1": ["a"]})))
    program = (
        "import sys, cni.ipoib.plugin, cni.sriov.plugin; from pathlib import Path; "
        "from base.paths import Paths; "
        "from deviceplugin.kubelet import records; "
        "assert records.from_checkpoint(Paths(kubelet=Path(sys.argv[1]))); "
        "assert not {'grpc', 'yaml'}.intersection(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(paths.kubelet)], check=True)
