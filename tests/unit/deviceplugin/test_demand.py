"""Whose GPUs the next HCAs are for, as far as it can be told."""

import pytest
from msgspec import Struct

from deviceplugin.grants.demand import waiting_gpus
from host.gpus import GPU
from tests.unit.host import servers

GPUS = [GPU(uuid=servers.gpu_uuid(n), address=f"0000:1{n}:00.0", minor=n, numa=0) for n in range(4)]
OURS = ("rdma/hca", "rdma/vf")


class Row(Struct, frozen=True):
    """The fields of kubelet.PodDevices that matter here."""

    name: str
    container: str
    resource: str
    ids: tuple[str, ...]
    namespace: str = "ml"


def _gpus(pod: str, container: str, *numbers: int) -> Row:
    return Row(pod, container, "nvidia.com/gpu", tuple(servers.gpu_uuid(n) for n in numbers))


@pytest.mark.parametrize(
    ("rows", "numbers"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([_gpus("a", "x", 2, 1)], [1, 2], id="one container"),
        pytest.param(
            [_gpus("a", "x", 0), Row("a", "x", "rdma/hca", ("h",)), _gpus("b", "x", 1)],
            [1],
            id="another has its HCAs",
        ),
        pytest.param(
            [_gpus("a", "x", 0), Row("a", "x", "rdma/vf", ("h",))], [], id="has some of ours"
        ),
        pytest.param([_gpus("a", "x", 0), Row("a", "x", "rdma/hca", ())], [0], id="has none yet"),
        pytest.param([_gpus("a", "x", 0), _gpus("b", "x", 1)], [], id="two pods: not to be told"),
        pytest.param([_gpus("a", "x", 0), _gpus("a", "y", 1)], [], id="two containers"),
        pytest.param([_gpus("a", "init", 0), _gpus("a", "x", 0)], [0], id="init container's GPUs"),
        pytest.param([_gpus("a", "x", 0), _gpus("a", "x", 3)], [0, 3], id="in several rows"),
        pytest.param([Row("a", "x", "other.example/thing", ("7",))], [], id="no GPU"),
        pytest.param(
            [Row("a", "x", "s.example/gpu", (f"{servers.gpu_uuid(1)}::3",))],
            [1],
            id="a share of a GPU",
        ),
        pytest.param(
            [Row("a", "x", "nvidia.com/gpu", (servers.gpu_uuid(9),))], [], id="a GPU that is gone"
        ),
    ],
)
def test_gpus_of_the_one_container_that_lacks_hcas(rows: list[Row], numbers: list[int]) -> None:
    expected = [GPUS[number].address for number in numbers]
    assert waiting_gpus(rows, OURS, GPUS) == expected
    assert waiting_gpus(rows[::-1], OURS, GPUS) == expected
