"""Claims: one HCA for each attachment of a pod, the same one again."""

import os
import threading
import time
from pathlib import Path

import pytest

from deviceplugin.claims import YOUNG, Pod, claims_of, prune
from host.paths import Paths

A, B, C = "0000:3b:00.0", "0000:5e:00.0", "0000:af:00.0"
POD = Pod("ml", "worker-0", "5a4ad5c2-uid")


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(run=tmp_path / "run", state=tmp_path / "state")


def attach(paths: Paths, attachment: str, pod: Pod = POD, held: tuple[str, ...] = (A, B)) -> str:
    with claims_of(paths, pod) as claims:
        chosen = claims.ordered(attachment, held)[0]
        claims.take(attachment, chosen)
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


def test_claim_of_what_the_pod_no_longer_holds_does_not_count(paths: Paths) -> None:
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
    attach(paths, "fabric/net1", Pod("ml", "worker-0", uid))
    assert len(list((paths.devices / "pods").iterdir())) == 1


def test_attachments_at_once_take_different_ones(paths: Paths) -> None:
    held = tuple(f"0000:{n:02x}:00.0" for n in range(8))
    seen: list[str] = []
    threads = [
        threading.Thread(target=lambda n=n: seen.append(attach(paths, f"fabric/net{n}", held=held)))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == sorted(held)
    assert list(paths.locks.iterdir()) == []


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
