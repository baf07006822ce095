"""Overheads are measured only where the driver's answer and the allocations are of one moment."""

from gpu.watch.context_overhead import Overheads

MIB = 1 << 20
KEY = ("g", 0, 1)


def test_what_the_driver_says_above_the_allocations_is_overhead() -> None:
    assert Overheads().measure(KEY, 100 * MIB, 500 * MIB, 100 * MIB) == 400 * MIB


def test_an_allocation_during_the_look_does_not_count_twice() -> None:
    overheads = Overheads()
    assert overheads.measure(KEY, 0, 400 * MIB, 100 * MIB) is None
    assert overheads.measure(KEY, 100 * MIB, 500 * MIB, 100 * MIB) == 400 * MIB
    assert overheads.measure(KEY, 100 * MIB, 1500 * MIB, 1100 * MIB) == 400 * MIB


def test_one_wrong_measurement_changes_nothing() -> None:
    """An allocation that is counted and not made yet, or freed and not given back yet."""
    overheads = Overheads()
    for device in (500, 500, 100, 500, 1500, 500):
        assert overheads.measure(KEY, 100 * MIB, device * MIB, 100 * MIB) == 400 * MIB


def test_a_context_that_grows_is_followed_and_noise_is_not() -> None:
    overheads = Overheads()
    seen = [
        overheads.measure(KEY, 0, bytes_, 0)
        for bytes_ in (400 * MIB, 400 * MIB + 4096, 450 * MIB, 450 * MIB, 450 * MIB + 4096)
    ]
    assert seen == [400 * MIB, 400 * MIB, 400 * MIB, 450 * MIB, 450 * MIB]


def test_more_allocated_than_the_driver_says_is_no_overhead() -> None:
    assert Overheads().measure(KEY, 500 * MIB, 100 * MIB, 500 * MIB) == 0


def test_processes_that_are_gone_are_forgotten() -> None:
    overheads = Overheads()
    overheads.measure(KEY, 0, 400 * MIB, 0)
    overheads.look({}, {}, {}, {})
    assert overheads.measure(KEY, 0, 0, 1) is None
