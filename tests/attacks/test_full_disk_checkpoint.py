"""The checkpoint on a full disk, or without descriptors: it contains every answered allocation."""

from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from base.paths import Paths
from base.types import DeviceId
from deviceplugin import checkpoint
from deviceplugin.checkpoint import AllocatedHCA, AllocationKey, CheckpointUnreadable
from deviceplugin.ledger import Ledger
from tests.attacks.full_disk import SmallDisk, calls_left, descriptors_left, small_disk

RESOURCE, OTHER = "rdma/hca", "rdma/other"
LEFT = {"descriptors": descriptors_left, "memory": calls_left}
ENOUGH = 12  # pages, or descriptors

Act = Callable[[Ledger], object]


def key(number: int) -> AllocationKey:
    return RESOURCE, DeviceId(f"0000:3b:00.0-{number}")


def grant(ledger: Ledger, number: int) -> None:
    """Record an Allocate of that id."""
    device = AllocatedHCA(id="0000:3b:00.0", address="0000:3b:00.0", netdevs=("x" * 400,), rdma=())
    ledger.record(RESOURCE, {key(number)[1]: (device,)})


def allocate(ledger: Ledger) -> None:
    grant(ledger, 9)


def prune(ledger: Ledger) -> None:
    ledger.drop_unknown([key(0)], age=-60.0)


def serve(ledger: Ledger) -> None:
    """Load the checkpoint, as when the pools are offered."""
    ledger.serve({RESOURCE: (), OTHER: ()})


AFTER: dict[Act, list[int]] = {allocate: [0, 1, 9], prune: [0], serve: [0, 1]}


@pytest.fixture
def disk() -> Iterator[SmallDisk]:
    with small_disk() as disk:
        yield disk


def paths_on(disk: SmallDisk) -> Paths:
    return Paths(state=disk.directory)


def begun(disk: SmallDisk, *, restarted: bool) -> Ledger:
    """A ledger with two allocations, on a disk that has nothing else."""
    disk.empty()
    ledger = ledger_on(disk)
    ledger.serve({RESOURCE: ()})
    for number in range(2):
        grant(ledger, number)
    return ledger_on(disk) if restarted else ledger


def ledger_on(disk: SmallDisk) -> Ledger:
    return Ledger(paths_on(disk), "this boot", pytest.fail)


def on_disk(disk: SmallDisk) -> set[AllocationKey]:
    return {allocation.key for allocation in checkpoint.read(paths_on(disk)).allocations}


def keys(numbers: list[int]) -> set[AllocationKey]:
    return {key(number) for number in numbers}


def require_that_all_goes_on(disk: SmallDisk, ledger: Ledger, act: Act) -> None:
    """With room again, check that the act works without a restart, and that no other file is
    left."""
    act(ledger)
    ledger.settle()
    assert ledger.keys() == on_disk(disk) == keys(AFTER[act])
    if act is serve:
        assert list(checkpoint.read(paths_on(disk)).offered) == [RESOURCE, OTHER]
    assert disk.files() == {"devices/checkpoint.json"}
    assert ledger_on(disk).keys() == ledger.keys()


@pytest.mark.parametrize("restarted", [False, True], ids=["same process", "restarted"])
@pytest.mark.parametrize("act", [allocate, prune, serve])
@pytest.mark.parametrize("what", ["pages", "inodes", "descriptors", "memory"])
def test_checkpoint_matches_the_answers(
    disk: SmallDisk, act: Act, what: str, restarted: bool
) -> None:
    answers = []
    for number in range(ENOUGH):
        ledger = begun(disk, restarted=restarted)
        answers.append(False)
        with suppress(OSError):
            if what in LEFT:
                with LEFT[what](number):
                    act(ledger)
            else:
                (disk.leave_pages if what == "pages" else disk.leave_inodes)(number)
                act(ledger)
            answers[-1] = True
        now = keys(AFTER[act] if answers[-1] else [0, 1])
        assert ledger.keys() == now
        # If only the last call failed, which makes the new name survive a power cut, the file has
        # the unanswered allocations. The next write corrects that.
        last_call_failed = what == "memory" and not answers[-1] and on_disk(disk) != now
        assert on_disk(disk) == (keys(AFTER[act]) if last_call_failed else now)
        disk.make_room()
        require_that_all_goes_on(disk, ledger, act)
    assert answers[-1]


def test_every_answered_allocation_is_kept_while_the_disk_stays_full(
    disk: SmallDisk,
) -> None:
    ledger = begun(disk, restarted=False)
    disk.leave_pages(0)
    answered = {key(0), key(1)}
    failures = 0
    for number in range(2, 40):
        try:
            grant(ledger, number)
            answered.add(key(number))
        except OSError as error:
            assert error.strerror == "No space left on device"
            failures += 1
        assert on_disk(disk) == ledger.keys() == answered
    assert failures
    disk.make_room()
    grant(ledger, 40)
    assert on_disk(disk) == ledger.keys() == {*answered, key(40)}


@pytest.mark.parametrize("act", [allocate, prune, serve])
def test_read_only_disk_is_an_error_and_nothing_is_lost(disk: SmallDisk, act: Act) -> None:
    ledger = begun(disk, restarted=False)
    disk.make_read_only()
    with pytest.raises(OSError, match="Read-only file system"):
        act(ledger)
    assert ledger.keys() == on_disk(disk) == keys([0, 1])
    disk.make_writable()
    require_that_all_goes_on(disk, ledger, act)


def test_ledger_forgets_nothing_while_its_checkpoint_is_unreadable(disk: SmallDisk) -> None:
    begun(disk, restarted=False)
    with descriptors_left(0), pytest.raises(CheckpointUnreadable, match="Too many open files"):
        ledger_on(disk)
    assert ledger_on(disk).keys() == keys([0, 1])
