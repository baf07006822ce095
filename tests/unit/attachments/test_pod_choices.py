"""Choices: an HCA for each attachment of a pod, and the same HCA when it comes again."""

import os
import time
from pathlib import Path

import msgspec
import pytest

from base.paths import Paths
from base.pod import Pod
from cni.attachments.pod_choices import YOUNG, PodChoices, lock_of, prune

A, B, C = "0000:3b:00.0", "0000:5e:00.0", "0000:af:00.0"
POD = Pod("ml", "worker-0", "5a4ad5c2-uid")


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(run=tmp_path / "run", state=tmp_path / "state")


def attach(paths: Paths, attachment: str, pod: Pod = POD, held: tuple[str, ...] = (A, B)) -> str:
    choices = PodChoices(paths, pod)
    chosen = choices.ordered(attachment, held)[0]
    choices.record(attachment, chosen)
    return chosen


def test_each_attachment_has_one_in_order(paths: Paths) -> None:
    assert [attach(paths, f"fabric/net{n}") for n in (1, 2)] == [A, B]


def test_more_attachments_than_hcas_share_them_evenly(paths: Paths) -> None:
    assert [attach(paths, f"fabric/net{n}") for n in range(1, 6)] == [A, B, A, B, A]


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 3, 1)])
def test_again_gives_the_same(paths: Paths, order: tuple[int, ...]) -> None:
    held = (A, B, C)
    first = {n: attach(paths, f"fabric/net{n}", held=held) for n in (1, 2, 3)}
    assert {n: attach(paths, f"fabric/net{n}", held=held) for n in order} == first


def test_choice_of_an_hca_that_the_pod_no_longer_holds_does_not_count(paths: Paths) -> None:
    assert attach(paths, "fabric/net1", held=(A,)) == A
    assert attach(paths, "fabric/net1", held=(B, C)) == B


def test_pods_do_not_know_each_other(paths: Paths) -> None:
    other = Pod("ml", "worker-0", "another-uid")
    assert attach(paths, "fabric/net1") == attach(paths, "fabric/net1", other) == A


def test_pod_without_uid_is_known_by_its_name(paths: Paths) -> None:
    nameless = Pod("ml", "worker-0")
    assert attach(paths, "fabric/net1", nameless) == A
    assert attach(paths, "fabric/net2", nameless) == B


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"claims": 5}', b"\xff"])
def test_damaged_file_is_as_good_as_none(paths: Paths, content: bytes) -> None:
    attach(paths, "fabric/net1")
    (file,) = (paths.devices / "pods").iterdir()
    file.write_bytes(content)
    assert attach(paths, "fabric/net1") == A


@pytest.mark.parametrize("uid", ["../../etc/passwd", "a/b", "", "x" * 5000, "\0"])
def test_no_uid_leads_out_of_the_directory(paths: Paths, uid: str) -> None:
    pod = Pod("ml", "worker-0", uid)
    attach(paths, "fabric/net1", pod)
    assert len(list((paths.devices / "pods").iterdir())) == 1
    assert lock_of(paths, pod).parent == paths.locks


def test_files_of_pods_that_the_kubelet_forgot_are_removed(paths: Paths) -> None:
    attach(paths, "fabric/net1")
    attach(paths, "fabric/net1", Pod("ml", "worker-1", "by-name"))
    attach(paths, "fabric/net1", Pod("ml", "worker-2", "gone"))
    assert prune(paths, {("ml", "worker-1")}, {POD.uid}) == []  # all are too young to tell
    old = time.time() - YOUNG - 1
    for file in (paths.devices / "pods").iterdir():
        os.utime(file, (old, old))
    assert len(prune(paths, {("ml", "worker-1")}, {POD.uid})) == 1
    assert len(list((paths.devices / "pods").iterdir())) == 2


def test_files_of_a_name_that_came_again_are_removed(paths: Paths) -> None:
    """As a StatefulSet's pod does, which the kubelet knows by its name all the time."""
    lives = [Pod("ml", "worker-0", f"uid-{number}") for number in range(5)]
    for pod in lives:
        attach(paths, "fabric/net1", pod)
    attach(paths, "fabric/net1", Pod("ml", "worker-1", "by-name"))
    names, uids = {("ml", "worker-0"), ("ml", "worker-1")}, {"uid-4"}
    assert prune(paths, names, uids) == []  # all are too young to tell
    old = time.time() - YOUNG - 1
    for file in (paths.devices / "pods").iterdir():
        os.utime(file, (old, old))
    assert len(prune(paths, names, uids)) == 4
    left = [msgspec.json.decode(file.read_bytes()) for file in (paths.devices / "pods").iterdir()]
    assert {choices["uid"] for choices in left} == {"uid-4", "by-name"}
