"""The address store where a disk, descriptors or memory are lacking: every answer is true."""

import random

import pytest

from ipam import database
from tests.attacks.full_disk import descriptors_left, memory_left, small_disk
from tests.attacks.full_disk_ipam import VERBS, WAYS, WRITING, disk_with_store, node_on

ENOUGH = 24  # pages: enough for any call
ENOUGH_FOR_A_NEW_STORE = 48
ENOUGH_DESCRIPTORS = 14


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verb", VERBS)
def test_answer_is_true_however_many_pages_are_left(verb: str, way: str) -> None:
    container_id = "new" if verb == "ADD" else "c1"
    answers = []
    with disk_with_store() as disk:
        for pages in range(0, ENOUGH, 1 if verb in WRITING else 6):
            disk.restore()
            with node_on(disk.directory, way) as node:
                disk.leave_pages(pages)
                answers.append(node.call(verb, container_id))
                node.require_true()
                disk.make_room()
                node.require_that_all_goes_on()
    assert answers[-1], "so many pages are enough"
    assert not (answers[0] and verb in WRITING), "nothing was lacking"


@pytest.mark.parametrize("way", WAYS)
def test_answer_is_true_however_many_pages_are_left_for_a_new_store(way: str) -> None:
    answers = []
    with small_disk() as disk:
        for pages in range(ENOUGH_FOR_A_NEW_STORE):
            disk.empty()
            with node_on(disk.directory, way) as node:
                disk.leave_pages(pages)
                answers.append(node.call("ADD", "c1"))
                disk.make_room()
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
                disk.leave_pages(pages)
                node.call("DEL", "c1")
                node.require_true()
                disk.make_room()
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
def test_answer_is_true_without_inodes(verb: str, way: str) -> None:
    with disk_with_store() as disk:
        for inodes in range(4):
            disk.restore()
            with node_on(disk.directory, way) as node:
                disk.leave_inodes(inodes)
                node.call(verb, "new" if verb == "ADD" else "c1")
                disk.make_room()
                node.require_that_all_goes_on()


@pytest.mark.parametrize("way", WAYS)
def test_answer_is_true_without_inodes_for_a_new_store(way: str) -> None:
    with small_disk() as disk:
        for inodes in range(8):
            disk.empty()
            with node_on(disk.directory, way) as node:
                disk.leave_inodes(inodes)
                node.call("ADD", "c1")
                disk.make_room()
                node.require_that_all_goes_on()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verb", VERBS)
def test_answer_is_true_on_a_read_only_disk(verb: str, way: str) -> None:
    with disk_with_store() as disk:
        disk.restore()
        with node_on(disk.directory, way) as node:
            for round_ in range(3):
                node.close_files()  # or the disk cannot be remounted
                disk.make_read_only()
                answered = node.call(verb, "new" if verb == "ADD" else f"c{round_}")
                assert not (answered and verb in WRITING)
                disk.make_writable()
                node.require_true()
            node.require_that_all_goes_on()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verb", VERBS)
def test_answer_is_true_however_many_descriptors_are_left(verb: str, way: str) -> None:
    answers = []
    with disk_with_store() as disk:
        for descriptors in range(ENOUGH_DESCRIPTORS):
            disk.restore()
            with node_on(disk.directory, way) as node:
                if descriptors % 2:  # the files of the store are open already, if they are kept
                    node.require_true()
                with descriptors_left(descriptors):
                    answers.append(node.call(verb, "new" if verb == "ADD" else "c1"))
                node.require_that_all_goes_on()
    assert answers[-1] and not answers[0]


@pytest.mark.parametrize("way", WAYS)
def test_answer_is_true_however_many_descriptors_are_left_for_a_new_store(way: str) -> None:
    answers = []
    with small_disk() as disk:
        for descriptors in range(ENOUGH_DESCRIPTORS):
            disk.empty()
            with node_on(disk.directory, way) as node:
                with descriptors_left(descriptors):
                    answers.append(node.call("ADD", "c1"))
                node.require_that_all_goes_on()
    assert answers[-1] and not answers[0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verb", ["ADD", "DEL", "GC"])
def test_answer_is_true_however_little_memory_is_left(verb: str, way: str) -> None:
    answers = []
    with disk_with_store() as disk:
        for memory in range(0, 240 << 10, 6 << 10):
            disk.restore()
            with node_on(disk.directory, way) as node:
                node.require_true()  # the files of the store are open already, if they are kept
                with memory_left(memory):
                    answers.append(node.call(verb, "new" if verb == "ADD" else "c1"))
                node.require_true()
                if answers[-1]:
                    break
                node.require_that_all_goes_on()
    assert answers[-1] and not answers[0]
