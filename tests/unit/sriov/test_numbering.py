"""RDMA devices that move or are created again keep their numbers, or the ADD fails."""

import threading
from pathlib import Path

import pytest

from base.paths import Paths
from cni.spec.errors import CNIError
from cni.sriov import numbering
from tests.unit.host.sysfs import Tree
from tests.waiting import PATIENCE

NAMES = ("rxe0",)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    tree = Tree(tmp_path / "sys", Paths(sys=tmp_path / "sys", run=tmp_path / "run"))
    tree.netdev("", "eth0")
    tree.soft_rdma("rxe0", "eth0")
    tree.character("infiniband_verbs", "uverbs2", "rxe0", "231:194")
    return tree


def _renumber(tree: Tree, number: int) -> None:
    (tree.root / "class/infiniband_verbs/uverbs2").unlink()
    tree.character("infiniband_verbs", f"uverbs{number}", "rxe0", f"231:{192 + number}")


def test_number_that_stays_is_fine(tree: Tree) -> None:
    with numbering.kept(tree.paths, NAMES):
        _renumber(tree, 2)


def test_other_number_is_an_error_with_both(tree: Tree) -> None:
    with pytest.raises(CNIError) as caught, numbering.kept(tree.paths, NAMES):
        _renumber(tree, 3)
    assert caught.value.code == 100
    for named in ("rxe0", "uverbs2 (231:194)", "uverbs3 (231:195)"):
        assert named in caught.value.message


def test_nothing_is_locked_without_a_device(tree: Tree) -> None:
    with numbering.kept(tree.paths, ()):
        assert not (tree.paths.locks / "uverbs").exists()


def test_device_that_is_not_created_again_has_no_number(tree: Tree) -> None:
    """In exclusive mode the pod gets none."""
    with numbering.kept(tree.paths, NAMES):
        (tree.root / "class/infiniband_verbs/uverbs2").unlink()


def test_devices_of_two_pods_are_not_numbered_at_the_same_time(tree: Tree) -> None:
    order = []
    inside = threading.Event()

    def other() -> None:
        inside.wait(PATIENCE)
        with numbering.exclusively(tree.paths):
            order.append("other")

    thread = threading.Thread(target=other)
    thread.start()
    with numbering.exclusively(tree.paths):
        inside.set()
        with numbering.exclusively(tree.paths):  # the thread has the lock already
            order.append("within")
        thread.join(0.3)
        order.append("first")
    thread.join(PATIENCE)
    assert order == ["within", "first", "other"]
