"""The gate of compute shares: what is not finished, and what the agent settles."""

from pathlib import Path

import pytest

from gpu.limits import layout
from tests.gpu.gate import KAPPA, MS, UNKNOWN, US, Gate, S

# ---- what the agent settles


def test_what_the_agent_settles_moves_the_debt_once(gate: Gate) -> None:
    gate.gpu.tat = gate.now
    gate.limit.settled_ns = S  # half of the GPU: two seconds
    assert gate.launch() == 2 * S
    assert gate.launch() == 2 * UNKNOWN
    gate.gpu.tat = gate.now + 5 * S
    gate.limit.settled_ns = -S
    assert gate.launch() == S
    assert gate.gpu.settled_ns == -S


def test_what_is_settled_while_a_launch_waits_counts_at_once(gate: Gate) -> None:
    gate.gpu.tat = gate.now + 50 * S
    gate.while_sleeping(lambda _: setattr(gate.limit, "settled_ns", -20 * S))
    assert gate.launch() == pytest.approx(10 * S, rel=0.02)


@pytest.mark.parametrize("settled", [2**63 - 1, -(2**63)])
@pytest.mark.parametrize("before", [0, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("tat", [0, 2**64 - 1])
def test_nothing_that_is_settled_makes_a_launch_wait_longer_than_the_cap(
    gate: Gate, settled: int, before: int, tat: int
) -> None:
    gate.gpu.settled_ns, gate.gpu.tat, gate.limit.settled_ns = before, tat, settled
    assert gate.launch() <= 60 * S


# ---- what is unfinished


def _queued(measuring: Gate, ns: int, *, stream: int = 0) -> int:
    """How many launches of a kernel the driver has, while it finishes none."""
    count = 0
    while measuring.launch(2, ns, stream=stream) < ns // 2:
        count += 1
    return count


@pytest.mark.parametrize(("ns", "most"), [(S, 1), (15 * MS, 4), (5 * MS, 11), (MS, 51)])
def test_a_launch_waits_while_its_stream_has_much_to_do(
    measuring: Gate, ns: int, most: int
) -> None:
    """Of the burst, and what was not used for long, it could pay for more."""
    measuring.know(2, ns)
    measuring.limit.share = 9999
    measuring.limit.burst_ns = 60 * S
    measuring.now += 60 * S
    assert _queued(measuring, ns) == most


def test_another_stream_does_not_wait(measuring: Gate) -> None:
    measuring.know(2, S)
    measuring.limit.share, measuring.limit.burst_ns = 9999, 60 * S
    measuring.now += 60 * S
    assert measuring.launch(2, S) == 0
    assert measuring.launch(2, S, stream=1) == 0
    assert measuring.launch(2, S) >= S


def test_a_kernel_that_needs_a_later_launch_gets_it(measuring: Gate) -> None:
    """It waits on the GPU for what a later one writes, which waits at the gate for a while."""
    measuring.know(2, 60 * MS)
    measuring.limit.share, measuring.limit.burst_ns = 5000, 60 * S
    measuring.now += 60 * S
    measuring.launch(2, 3600 * S)
    for _ in range(3):
        assert measuring.launch(2, 60 * MS) == pytest.approx(16 * 2 * 60 * MS, rel=0.02)


def test_such_a_wait_is_at_most_the_cap(measuring: Gate) -> None:
    measuring.know(2, 30 * S)
    measuring.limit.share = 100
    measuring.launch(2, 3600 * S)
    measuring.now += 60 * S
    assert measuring.launch(2, 30 * S) == pytest.approx(60 * S, rel=0.001)


def test_kernels_of_nccl_do_not_wait_for_their_stream(measuring: Gate) -> None:
    measuring.know(2, S)
    measuring.limit.share = 9999
    measuring.launch(2, 3600 * S)
    measuring.name(function=b"ncclDevKernel_Generic")
    assert [measuring.launch(1, S) for _ in range(10)] == [0] * 10


def test_a_group_that_others_held_up_catches_up(measuring: Gate) -> None:
    """Its kernels took four times as long as they need; then it may launch one after another."""
    measuring.know(2, 100 * MS)
    for _ in range(3):
        measuring.launch(2, 400 * MS)  # half a second's worth of its share is not used
    waits = [measuring.launch(2, 100 * MS) for _ in range(8)]
    assert waits[0] == pytest.approx(400 * MS, rel=0.02)
    assert waits[1:6] == pytest.approx([100 * MS] * 5, rel=0.02)
    assert waits[-1] == pytest.approx(200 * MS, rel=0.15)


def test_a_group_that_did_nothing_for_a_while_does_not(measuring: Gate) -> None:
    measuring.know(2, 100 * MS)
    measuring.launch(2, 100 * MS)
    measuring.now += 10 * S
    measuring.launch(2, 100 * MS)
    assert measuring.launch(2, 100 * MS) == pytest.approx(180 * MS, rel=0.05)


def test_a_process_without_work_leaves_what_others_of_its_group_may_catch_up(gate: Gate) -> None:
    """Another process waited just now, and the group has used nothing for a second."""
    gate.gpu.tat, gate.gpu.backlogged_at = gate.now - S, gate.now - 100 * MS
    gate.launch()
    assert gate.debt == -S + 2 * UNKNOWN
    gate.gpu.tat, gate.gpu.backlogged_at = gate.now - S, gate.now + US
    gate.launch()
    assert gate.debt == -S + 2 * UNKNOWN
    gate.gpu.tat, gate.gpu.backlogged_at = gate.now - S, gate.now - 300 * MS
    gate.launch()
    assert gate.debt == -20 * MS + 2 * UNKNOWN


@pytest.mark.parametrize("ns", [26 * MS, 51 * MS, 60 * MS, 100 * MS])
def test_little_time_is_lost_between_long_kernels(measuring: Gate, ns: int) -> None:
    measuring.know(2, ns)
    measuring.limit.share = 9999
    began = measuring.now
    for _ in range(50):
        measuring.launch(2, ns)
    assert measuring.number("stream_free") - began <= 50 * ns * 1.03


def test_the_wait_for_a_stream_is_told(measuring: Gate) -> None:
    measuring.know(2, S)
    measuring.limit.share, measuring.limit.burst_ns = 9999, 60 * S
    measuring.now += 60 * S
    throttled, waited = measuring.gpu.throttled, measuring.gpu.wait_ns
    measuring.launch(2, S)
    after = measuring.launch(2, S)
    assert (measuring.gpu.throttled, measuring.gpu.wait_ns) == (throttled + 1, waited + after)


def test_first_launches_that_took_longer_than_they_paid_for_finish_when_they_do(
    measuring: Gate,
) -> None:
    for _ in range(4):
        measuring.launch(1, 10 * S)
    measuring.now += 21 * S  # two of them are done
    measuring.launch(1, 10 * S)
    assert measuring.gpu.launched_ns == pytest.approx(50 * S, rel=0.01)
    assert measuring.gpu.finished_ns <= 20 * S
    measuring.now += 100 * S
    measuring.launch(1, 10 * S)
    assert measuring.gpu.finished_ns == pytest.approx(50 * S, rel=0.01)


def test_a_long_kernel_does_not_finish_with_a_short_one_of_another_stream(measuring: Gate) -> None:
    measuring.know(1, 10 * US)
    measuring.know(2, 10 * S)
    finished = measuring.gpu.launched_ns
    measuring.limit.most_debt_ns = 0  # so that no launch waits
    measuring.launch(2, 10 * S)
    for _ in range(200):
        measuring.launch(1, 10 * US, stream=1)
    measuring.now += S
    measuring.launch(1, 10 * US, stream=1)
    assert 0 < measuring.gpu.finished_ns - finished < 10 * MS


def test_launches_that_cannot_be_timed_count_as_finished_and_are_not_all_tried(
    measuring: Gate,
) -> None:
    measuring.set("record_result", 700)
    for _ in range(1000):
        measuring.launch(1, 20 * US)
        measuring.now += MS
    assert measuring.gpu.launched_ns - measuring.gpu.finished_ns <= MS
    assert measuring.number("created_events") < 50
    assert measuring.number("live_events") == 0


def test_the_region_tells_what_was_launched_paid_and_finished(measuring: Gate) -> None:
    measuring.know(2, 10 * MS)
    measuring.limit.kappa = 2 * KAPPA
    before = layout.PfGpu.from_buffer_copy(measuring.gpu)
    measuring.launch(2, 10 * MS)
    gpu = measuring.gpu
    assert gpu.launched_ns - before.launched_ns == pytest.approx(10 * MS, rel=0.01)
    assert gpu.paid_ns - before.paid_ns == pytest.approx(20 * MS, rel=0.01)
    assert (gpu.finished_ns, gpu.paid_finished_ns) == (before.launched_ns, before.paid_ns)
    launched, paid = gpu.launched_ns, gpu.paid_ns
    measuring.now += S
    measuring.launch(2, 10 * MS)
    assert (gpu.finished_ns, gpu.paid_finished_ns) == (launched, paid)


def test_launches_between_two_that_are_timed_finish_with_the_second_one(measuring: Gate) -> None:
    measuring.know(2, 20 * US)
    for _ in range(1000):
        measuring.launch(2, 20 * US)
        measuring.now += MS
    unfinished = measuring.gpu.launched_ns - measuring.gpu.finished_ns
    assert 0 <= unfinished <= MS + 20 * US


def test_a_launch_that_failed_is_finished_with_a_later_one(measuring: Gate) -> None:
    measuring.know(2, 10 * MS)
    for _ in range(10):
        measuring.launch(2, result=700)
        measuring.now += S
    for _ in range(2):
        measuring.launch(2, 10 * MS)
        measuring.now += S
    measuring.launch(2, 10 * MS)
    unfinished = measuring.gpu.launched_ns - measuring.gpu.finished_ns
    assert unfinished == pytest.approx(10 * MS, rel=0.01)


def test_what_a_destroyed_context_had_to_do_is_finished(measuring: Gate) -> None:
    measuring.know(2, 10 * MS)
    measuring.launch(2, 10 * MS)
    assert measuring.gpu.finished_ns < measuring.gpu.launched_ns
    measuring.forget_events()
    assert measuring.gpu.finished_ns == measuring.gpu.launched_ns
    assert measuring.gpu.paid_finished_ns == measuring.gpu.paid_ns


def test_what_the_cap_kept_a_group_from_paying_is_not_paid(tmp_path: Path) -> None:
    gate = Gate(tmp_path, share=100)
    gate.know(1, 10 * S)
    paid = gate.gpu.paid_ns
    gate.launch(1, 10 * S)  # a thousand seconds by its share
    assert gate.gpu.paid_ns - paid == pytest.approx((60 * S + 20 * MS) / 100, rel=0.01)
