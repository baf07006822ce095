"""The stand-in behaves as a kubelet does, with any plugin, and our readers can read its state."""

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from base.paths import Paths
from base.types import DeviceId
from deviceplugin.api import podresources_pb2, podresources_pb2_grpc
from deviceplugin.kubelet import records as reader
from deviceplugin.kubelet.pod_resources import open_channel
from deviceplugin.kubelet.records import KubeletUnreadable, PodDevices
from tests.host.deviceplugin.other import Other
from tests.kubelet import Kubelet
from tests.waiting import PATIENCE

FOO, BAR = "example.com/foo", "example.com/bar"
Others = Callable[..., Other]


@pytest.fixture
def paths(root: Path) -> Paths:
    """The paths of the test's kubelet."""
    return Paths(kubelet=root)


@pytest.fixture
def others(kubelet: Kubelet) -> Iterator[Others]:
    """A function that registers another plugin with these attributes."""
    with ExitStack() as stack:

        def make(resource: str = FOO, count: int = 4, **attributes: object) -> Other:
            if not kubelet.socket.exists():
                kubelet.start()
            other = Other(kubelet.directory, resource, count)
            stack.callback(other.close)
            for name, value in attributes.items():
                setattr(other, name, value)
            other.register()
            kubelet.wait(lambda: kubelet.allocatable(resource) == count)
            return other

        yield make


def wants(name: str = "main", count: int = 1, resource: str = FOO, **other: bool) -> dict[str, Any]:
    return {"name": name, "limits": {resource: count}, **other}


def of_pod(paths: Paths, name: str, uid: str) -> list[PodDevices]:
    """The rows of a pod."""
    return reader.of_pod(paths, "default", name, uid)


def test_pod_resources_are_told_device_by_device_and_read_as_one(
    kubelet: Kubelet, others: Others, paths: Paths
) -> None:
    others(numa={"0": 0, "1": 1})
    pod = kubelet.admit("pod", [wants("b", 3), {"name": "a"}], namespace="ns")
    with open_channel(paths.pod_resources) as channel:
        stub = podresources_pb2_grpc.PodResourcesListerStub(channel)  # type: ignore[no-untyped-call]
        listed = stub.Get(
            podresources_pb2.GetPodResourcesRequest(pod_name="pod", pod_namespace="ns")
        ).pod_resources
        assert [len(container.devices) for container in listed.containers] == [3, 0]
        whole = stub.GetAllocatableResources(podresources_pb2.AllocatableResourcesRequest())
        assert len(whole.devices) == 4
    assert reader.from_pod_resources(paths) == [
        PodDevices(
            namespace="ns",
            name="pod",
            uid="",
            container="b",
            resource=FOO,
            ids=tuple(map(DeviceId, pod.containers["b"].ids[FOO])),
        )
    ]
    kubelet.remove(pod)
    assert reader.from_pod_resources(paths) == []


def test_the_rows_of_a_pod_have_its_init_containers_though_pod_resources_does_not(
    kubelet: Kubelet, others: Others, paths: Paths
) -> None:
    others()
    given = kubelet.admit("pod", [wants("z"), wants("a"), wants("init", 2, init=True)], uid="u-1")
    kubelet.admit("other", [wants()], uid="u-2")
    rows = of_pod(paths, "pod", "u-1")
    assert [row.container for row in rows] == ["z", "a", "init"]
    assert all((row.namespace, row.name, row.uid) == ("default", "pod", "u-1") for row in rows)
    assert [list(row.ids) for row in rows] == [
        given.containers[n].ids[FOO] for n in ("z", "a", "init")
    ]
    assert [row.container for row in of_pod(paths, "pod", "")] == ["z", "a"]
    assert of_pod(paths, "third", "u-3") == []


def test_a_former_pod_of_the_name_gives_no_devices_to_its_successor(
    kubelet: Kubelet, others: Others, paths: Paths
) -> None:
    others()
    kubelet.admit("pod", [wants(), wants("another")], uid="u-1")
    second = kubelet.admit("pod", [wants()], uid="u-2")
    (row,) = of_pod(paths, "pod", "u-2")
    assert list(row.ids) == second.containers["main"].ids[FOO]


def test_a_successor_without_devices_gets_none_of_its_predecessors(
    kubelet: Kubelet, others: Others, paths: Paths
) -> None:
    """PodResources shows the old pod of that name, which ends; the checkpoint has the new pod's
    UID."""
    others()
    former = kubelet.admit("pod", [wants()], uid="u-1")
    assert of_pod(paths, "pod", "u-2") == []
    kubelet.checkpoint.unlink()
    (row,) = of_pod(paths, "pod", "u-2")
    assert list(row.ids) == former.containers["main"].ids[FOO]


def test_without_a_uid_the_checkpoint_is_no_answer(
    kubelet: Kubelet, others: Others, paths: Paths
) -> None:
    others()
    kubelet.admit("pod", [wants()], uid="u-1")
    kubelet.stop()
    with pytest.raises(KubeletUnreadable, match=r"does not exist.*; .*identifies pods by UID"):
        of_pod(paths, "pod", "")


def claimed(device: str, *cdi: str) -> dict[str, Any]:
    names = [{"name": name} for name in cdi]
    return {
        "driver_name": "dra.net",
        "pool_name": "node-1",
        "device_name": device,
        "cdi_devices": names,
    }


@contextmanager
def telling(paths: Paths, *containers: dict[str, Any]) -> Iterator[None]:
    """A PodResources API with these containers of pod "pod"."""

    class Lister(podresources_pb2_grpc.PodResourcesListerServicer):
        def List(self, request: object, context: object) -> Any:  # noqa: ANN401
            pod = {"name": "pod", "namespace": "default", "containers": containers}
            return podresources_pb2.ListPodResourcesResponse(pod_resources=[pod])

    paths.pod_resources.parent.mkdir(parents=True)
    server = grpc.server(ThreadPoolExecutor(1))
    podresources_pb2_grpc.add_PodResourcesListerServicer_to_server(Lister(), server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(f"unix:{paths.pod_resources}")
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait(PATIENCE)


@pytest.mark.parametrize(
    ("device", "ids"),
    [
        (claimed("net0"), ("net0",)),
        (claimed("0000-3b-00-2"), ("0000-3b-00-2", "0000:3b:00.2")),
        (claimed("pci-0000-3B-00-2"), ("0000:3b:00.2", "pci-0000-3B-00-2")),
        (claimed("vf", "dra.net/net=0000:3b:00.2"), ("0000:3b:00.2", "vf")),
        (
            claimed("", "v/c=8d2f0a61-3b1c-4a7b-9c2d-4a7b1c2d3e4f-0000-3b-00-2", "v/c=all"),
            ("0000:3b:00.2",),
        ),
    ],
)
def test_what_a_claim_gave_is_known_by_names_and_addresses(
    paths: Paths, device: dict[str, Any], ids: tuple[str, ...]
) -> None:
    main = {"name": "main", "dynamic_resources": [{"claim_resources": [device]}]}
    with telling(paths, main):
        assert reader.from_pod_resources(paths) == []  # no device plugin's devices
        (row,) = of_pod(paths, "pod", "u-1")
    assert (row.resource, row.ids, row.claimed) == ("dra.net/node-1", ids, True)
    assert (row.uid, row.container) == ("u-1", "main")


def test_what_a_claim_gave_stands_beside_the_checkpoints_rows(paths: Paths) -> None:
    main = {
        "name": "main",
        "devices": [{"resource_name": FOO, "device_ids": ["5"]}],
        "dynamic_resources": [{"claim_resources": [claimed("vf")]}],
    }
    with telling(paths, main):
        paths.device_plugins.mkdir(parents=True)
        checkpoint = paths.device_plugins / "kubelet_internal_checkpoint"
        row = {"ContainerName": "main", "ResourceName": FOO, "DeviceIDs": {"-1": ["5"]}}
        for uid, ids in (("u-1", [("5",), ("vf",)]), ("u-0", [])):
            data = {"PodDeviceEntries": [{"PodUID": uid, **row}], "RegisteredDevices": {}}
            checkpoint.write_text(json.dumps({"Data": data, "Checksum": 0}))
            assert [row.ids for row in of_pod(paths, "pod", "u-1")] == ids


def test_the_checkpoint_is_enough_where_pod_resources_is_not_there(
    kubelet: Kubelet, others: Others, paths: Paths
) -> None:
    others()
    kubelet.admit("pod", [wants("b"), wants("a")], uid="u-1")
    kubelet.stop()
    with pytest.raises(KubeletUnreadable, match="does not exist: check that the kubelet runs"):
        reader.from_pod_resources(paths)
    rows = of_pod(paths, "pod", "u-1")
    assert [row.container for row in rows] == ["a", "b"]
    kubelet.checkpoint.write_text("{")
    with pytest.raises(
        KubeletUnreadable, match=r"does not exist.*; .*is not a valid checkpoint of the kubelet"
    ):
        of_pod(paths, "pod", "u-1")
    kubelet.checkpoint.unlink()
    with pytest.raises(KubeletUnreadable, match=r"does not exist.*; .*checkpoint: does not exist"):
        of_pod(paths, "pod", "u-1")


def test_pod_resources_is_enough_where_the_checkpoint_is_damaged(
    kubelet: Kubelet, others: Others, paths: Paths
) -> None:
    others()
    kubelet.admit("pod", [wants()], uid="u-1")
    kubelet.checkpoint.write_text("{")
    assert [row.container for row in of_pod(paths, "pod", "u-1")] == ["main"]


@pytest.mark.parametrize("listening", [True, False])
def test_a_kubelet_that_does_not_answer_is_given_up(
    paths: Paths, listening: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "KUBELET_TIMEOUT", 0.2)
    paths.pod_resources.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(paths.pod_resources))
        if listening:
            silent.listen()
        with pytest.raises(KubeletUnreadable, match=r"DEADLINE_EXCEEDED|UNAVAILABLE"):
            reader.from_pod_resources(paths)
