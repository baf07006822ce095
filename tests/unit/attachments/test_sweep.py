"""Several plugins' sweeps: one that fails keeps no other from its own."""

import pytest

from cni.attachments.removal import sweep_all
from cni.spec.errors import CNIError, Code


def fail() -> list[str]:
    raise CNIError(Code.KERNEL, "listing interfaces: no buffer space")


def test_what_one_removed_is_told_with_the_failure_of_another() -> None:
    done = sweep_all(fail, lambda: ["removed fabric/c1/net1: its sandbox is gone"])
    assert done == [
        "removed fabric/c1/net1: its sandbox is gone",
        "sweep: listing interfaces: no buffer space",
    ]


def test_failure_alone_is_an_error() -> None:
    with pytest.raises(CNIError, match="no buffer space"):
        sweep_all(fail, list)


def test_damaged_file_that_all_of_them_see_is_told_once() -> None:
    assert sweep_all(lambda: ["damaged"], lambda: ["damaged", "other"]) == ["damaged", "other"]
