"""For which GPUs the next HCAs are, as far as that is known."""

import msgspec
import pytest

from base.types import DeviceId
from deviceplugin.kubelet.records import PodDevices
from deviceplugin.pool_service import waiting_gpus
from host.sysfs.gpus import GPU
from tests.unit.host import servers

GPUS = [GPU(uuid=servers.gpu_uuid(n), address=f"0000:1{n}:00.0", minor=n, numa=0) for n in range(4)]
OURS = ("rdma/hca", "rdma/vf")


def _row(name: str, container: str, resource: str, ids: tuple[str, ...]) -> PodDevices:
    """A row of PodResources."""
    return PodDevices(
        namespace="ml",
        name=name,
        uid="",
        container=container,
        resource=resource,
        ids=tuple(map(DeviceId, ids)),
    )


def _gpus(pod: str, container: str, *numbers: int) -> PodDevices:
    return _row(pod, container, "nvidia.com/gpu", tuple(servers.gpu_uuid(n) for n in numbers))


def _written(uid: str, row: PodDevices) -> PodDevices:
    """The row as the kubelet's checkpoint has it, with the UID only."""
    return msgspec.structs.replace(row, name="", namespace="", uid=uid)


@pytest.mark.parametrize(
    ("rows", "numbers"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([_gpus("a", "x", 2, 1)], [1, 2], id="one container"),
        pytest.param(
            [_gpus("a", "x", 0), _row("a", "x", "rdma/hca", ("h",)), _gpus("b", "x", 1)],
            [1],
            id="another has its HCAs",
        ),
        pytest.param(
            [_gpus("a", "x", 0), _row("a", "x", "rdma/vf", ("h",))], [], id="has some of ours"
        ),
        pytest.param([_gpus("a", "x", 0), _row("a", "x", "rdma/hca", ())], [0], id="has none yet"),
        pytest.param([_gpus("a", "x", 0), _gpus("b", "x", 1)], [], id="two pods: not to be told"),
        pytest.param([_gpus("a", "x", 0), _gpus("a", "y", 1)], [], id="two containers"),
        pytest.param([_gpus("a", "init", 0), _gpus("a", "x", 0)], [0], id="init container's GPUs"),
        pytest.param([_gpus("a", "x", 0), _gpus("a", "x", 3)], [0, 3], id="in several rows"),
        pytest.param([_row("a", "x", "other.example/thing", ("7",))], [], id="no GPU"),
        pytest.param(
            [_row("a", "x", "s.example/gpu", (f"{servers.gpu_uuid(1)}::3",))],
            [1],
            id="a share of a GPU",
        ),
        pytest.param(
            [_row("a", "x", "nvidia.com/gpu", (servers.gpu_uuid(9),))], [], id="a GPU that is gone"
        ),
    ],
)
def test_gpus_of_the_one_container_that_lacks_hcas(
    rows: list[PodDevices], numbers: list[int]
) -> None:
    expected = [GPUS[number].address for number in numbers]
    assert waiting_gpus(rows, OURS, GPUS) == expected
    assert waiting_gpus(rows[::-1], OURS, GPUS) == expected


A = _gpus("a", "x", 0)
B = _gpus("b", "x", 1)
HCA_OF_A = _row("a", "x", "rdma/hca", ("h",))


@pytest.mark.parametrize(
    ("rows", "written", "numbers"),
    [
        pytest.param([A], [_written("u", A)], [], id="never asks for one"),
        pytest.param([A, B], [_written("u", A)], [1], id="beside one that never asks"),
        pytest.param([A, B], [], [], id="two, and the checkpoint tells of neither"),
        pytest.param(
            [A, B], [_written("u", A), _written("v", B)], [], id="two, and neither ever asks"
        ),
        pytest.param(
            [A], [_written("u", A), _written("u", HCA_OF_A)], [0], id="made again with its name"
        ),
        pytest.param(
            [A], [_written("u", _gpus("", "y", 0))], [0], id="GPU of a pod that ended: another name"
        ),
        pytest.param([A], [_written("u", _gpus("", "x", 1))], [0], id="another GPU"),
        pytest.param([_gpus("a", "x", 0, 1)], [_written("u", A)], [0, 1], id="one of its GPUs"),
        pytest.param(
            [_gpus("a", "init", 0), _gpus("a", "x", 0)],
            [_written("u", _gpus("a", "init", 0))],
            [0],
            id="the init container is done",
        ),
        pytest.param(
            [_gpus("a", "side", 0), _gpus("a", "x", 1)],
            [_written("u", _gpus("a", "side", 0))],
            [1],
            id="a sidecar is done",
        ),
        pytest.param(
            [_gpus("a", "x", 0), _gpus("a", "x", 3)],
            [_written("u", _gpus("a", "x", 3)), _written("u", _gpus("a", "x", 0))],
            [],
            id="in several rows",
        ),
    ],
)
def test_what_the_kubelet_has_written_down_waits_no_more(
    rows: list[PodDevices], written: list[PodDevices], numbers: list[int]
) -> None:
    expected = [GPUS[number].address for number in numbers]
    assert waiting_gpus(rows, OURS, GPUS, written) == expected
    assert waiting_gpus(rows[::-1], OURS, GPUS, written[::-1]) == expected
