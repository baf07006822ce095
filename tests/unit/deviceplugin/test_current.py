"""Whether the uverbs nodes of a holder are still those of its HCA."""

import pytest

from deviceplugin.checkpoint import AllocatedHCA, AllocatedNode, AllocatedRdmaDevice
from deviceplugin.current import Uverbs, outdated

ZERO, ONE, TWO = (("uverbs0", 231, 192), ("uverbs1", 231, 193), ("uverbs2", 231, 194))


def given(**uverbs: Uverbs | None) -> AllocatedHCA:
    """An HCA as the checkpoint has it, with these uverbs devices of RDMA devices."""
    rdma = tuple(
        AllocatedRdmaDevice(
            name=name,
            uverbs=None if node is None else AllocatedNode(f"/dev/infiniband/{node[0]}", *node[1:]),
            ports=(),
        )
        for name, node in uverbs.items()
    )
    return AllocatedHCA(id="0000:3b:00.0", address="0000:3b:00.0", netdevs=(), rdma=rdma)


@pytest.mark.parametrize(
    "now",
    [
        {"mlx5_0": ZERO},
        {"mlx5_9": ZERO},  # renamed
        {"mlx5_0": ZERO, "mlx5_1": ONE},
        {},  # in a pod, or its driver is not loaded: nothing can be said
    ],
)
def test_nodes_are_current(now: dict[str, Uverbs]) -> None:
    assert outdated(given(mlx5_0=ZERO), now) is None


@pytest.mark.parametrize("now", [{"mlx5_0": ONE}, {"mlx5_9": ONE}, {"mlx5_0": ONE, "mlx5_1": ZERO}])
def test_other_numbers_are_not_current(now: dict[str, Uverbs]) -> None:
    assert outdated(given(mlx5_0=ZERO), now) is not None


def test_holder_without_a_node_has_none_that_could_differ() -> None:
    assert outdated(given(mlx5_0=None), {"mlx5_0": ONE}) is None


def test_first_device_that_differs_is_named() -> None:
    wrong = outdated(given(mlx5_0=ZERO, mlx5_1=ONE), {"mlx5_0": ZERO, "mlx5_1": TWO})
    assert wrong is not None
    assert wrong.name == "mlx5_1"


def test_look_at_a_part_of_the_devices_judges_that_part() -> None:
    hca = given(mlx5_0=ZERO, mlx5_1=ONE)
    assert outdated(hca, {"mlx5_0": ZERO}) is not None
    assert outdated(hca, {"mlx5_0": ZERO}, complete=False) is None
