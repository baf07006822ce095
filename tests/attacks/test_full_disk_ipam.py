"""The address store without enough disk, descriptors or memory: every answer is true."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import pytest

from ipam.store import database
from tests.attacks.full_disk import SmallDisk, descriptors_left, memory_left, small_disk
from tests.attacks.full_disk_ipam import VERBS, WAYS, WRITING, disk_with_store, node_on

ENOUGH = 24  # pages, enough for any call


@contextmanager
def _pages(disk: SmallDisk, number: int) -> Iterator[None]:
    disk.leave_pages(number)
    yield
    disk.make_room()


@contextmanager
def _inodes(disk: SmallDisk, number: int) -> Iterator[None]:
    disk.leave_inodes(number)
    yield
    disk.make_room()


class Lack(NamedTuple):
    """A lacking resource, and the amounts of it with which a call is tried; the last is enough."""

    left: Callable[[SmallDisk, int], AbstractContextManager[None]]
    tried: range
    tried_for_a_new_store: range


LACKS = {
    "pages": Lack(_pages, range(ENOUGH), range(48)),
    "inodes": Lack(_inodes, range(4), range(8)),
    "descriptors": Lack(lambda _, number: descriptors_left(number), range(14), range(14)),
    "memory": Lack(lambda _, number: memory_left(number), range(0, 240 << 10, 6 << 10), range(0)),
}
NEEDED = {"pages": WRITING, "inodes": set[str](), "descriptors": set(VERBS), "memory": WRITING}
"""The verbs that fail while there is none of it: a store that is there needs no inode."""


def _may_lack(what: str, verb: str) -> bool:
    """Whether this case is tried: a verb that only reads needs almost no memory."""
    return what != "memory" or verb in WRITING


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("what", "verb"), [(what, verb) for what in LACKS for verb in VERBS if _may_lack(what, verb)]
)
def test_answer_is_true_however_little_is_left(what: str, verb: str, way: str) -> None:
    lack, answers = LACKS[what], []
    step = 6 if what == "pages" and verb not in WRITING else 1
    with disk_with_store() as disk:
        for number in lack.tried[::step]:
            disk.restore()
            with node_on(disk.directory, way) as node:
                if what == "memory" or number % 2:  # files are open already, if they are kept
                    node.require_true()
                with lack.left(disk, number):
                    answers.append(node.call(verb, "new" if verb == "ADD" else "c1"))
                    if what == "pages":
                        node.require_true()
                node.require_that_all_goes_on()
            if what == "memory" and answers[-1]:
                break
    assert answers[-1], "so much is enough"
    assert not (answers[0] and verb in NEEDED[what]), "nothing was lacking"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", ["pages", "inodes", "descriptors"])
def test_answer_is_true_however_little_is_left_for_a_new_store(what: str, way: str) -> None:
    lack, answers = LACKS[what], []
    with small_disk() as disk:
        for number in lack.tried_for_a_new_store:
            disk.empty()
            with node_on(disk.directory, way) as node:
                with lack.left(disk, number):
                    answers.append(node.call("ADD", "c1"))
                node.require_that_all_goes_on()
    assert answers[-1] and not answers[0]


@pytest.mark.parametrize("way", WAYS)
def test_del_is_true_however_many_pages_are_left_when_the_wal_is_written_back(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(database, "_MOST_PAGES", 1)
    with disk_with_store() as disk:
        for pages in range(ENOUGH):
            disk.restore()
            with node_on(disk.directory, way) as node:
                with _pages(disk, pages):
                    node.call("DEL", "c1")
                    node.require_true()
                node.require_that_all_goes_on()


@pytest.mark.parametrize("way", WAYS)
def test_answers_stay_true_while_a_disk_gets_full_and_empty_again(way: str) -> None:
    chance = random.Random(way)
    with disk_with_store() as disk:
        disk.restore()
        with node_on(disk.directory, way) as node:
            for _ in range(60):
                disk.make_room()
                disk.leave_pages(chance.randrange(ENOUGH))
                for _ in range(chance.randrange(1, 5)):
                    container_id = f"c{chance.randrange(6)}"
                    held = container_id in node.said.values()
                    node.call(
                        chance.choice(["CHECK", "DEL", "GC"] if held else ["ADD"]), container_id
                    )
            disk.make_room()
            node.require_that_all_goes_on()
            assert node.failures


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verb", VERBS)
def test_answer_is_true_on_a_read_only_disk(verb: str, way: str) -> None:
    with disk_with_store() as disk:
        disk.restore()
        with node_on(disk.directory, way) as node:
            for round_ in range(3):
                node.close_files()  # otherwise the disk cannot be remounted
                disk.make_read_only()
                answered = node.call(verb, "new" if verb == "ADD" else f"c{round_}")
                assert not (answered and verb in WRITING)
                disk.make_writable()
                node.require_true()
            node.require_that_all_goes_on()
