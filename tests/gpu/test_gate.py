"""The gate of compute shares: who waits, for how long, and what that costs the group."""

from pathlib import Path

import pytest

from gpu import layout
from tests.gpu.gate import GRAPH, KAPPA, MS, UNKNOWN, US, WHOLE, Gate, S


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """Half of a GPU, and every launch is taken for one of 20 us."""
    return Gate(tmp_path, measures=False)


@pytest.fixture
def measuring(tmp_path: Path) -> Gate:
    """Half of a GPU, and events that tell how long kernels take."""
    return Gate(tmp_path)


# ---- how long launches wait


def test_a_group_with_the_whole_gpu_never_waits_and_nothing_is_counted(tmp_path: Path) -> None:
    gate = Gate(tmp_path, share=WHOLE)
    assert {gate.launch(ns=S) for _ in range(1000)} == {0}
    assert gate.gpu.tat == 0
    assert gate.number("created_events") == 0


def test_launches_are_as_far_apart_as_their_cost_divided_by_the_share(gate: Gate) -> None:
    while gate.launch() == 0:  # the burst
        pass
    assert [gate.launch() for _ in range(100)] == [2 * UNKNOWN] * 100


def test_a_burst_is_what_may_be_used_at_once_after_a_pause(gate: Gate) -> None:
    def burst() -> int:
        count = 1
        while gate.launch() == 0:
            count += 1
        return count

    gate.now += 3600 * S
    assert burst() == 20 * MS // (2 * UNKNOWN) + 2  # the last one waited
    gate.now += 3600 * S
    assert burst() == 20 * MS // (2 * UNKNOWN) + 2


def test_a_kernel_longer_than_the_burst_goes_at_once_and_the_next_one_waits(
    measuring: Gate,
) -> None:
    measuring.know(1, S)
    assert measuring.launch(1, S) == 0
    assert measuring.launch(1, S) == pytest.approx(2 * S - 20 * MS, rel=0.01)


def test_debt_is_at_most_the_cap(tmp_path: Path) -> None:
    """A kernel of 10 s with a hundredth of a GPU would have to pay for 1000 s."""
    gate = Gate(tmp_path, share=100)
    gate.know(1, 10 * S)
    assert gate.launch(1, 10 * S) == 0
    assert gate.debt == 60 * S
    assert gate.launch(1, 10 * S) == 60 * S
    assert gate.number("longest_sleep") <= 100 * MS


def test_short_waits_spin_and_long_ones_sleep(tmp_path: Path) -> None:
    gate = Gate(tmp_path, share=8000, measures=False)
    while gate.launch() == 0:
        pass
    assert gate.number("spun") == 25 * US
    assert gate.number("longest_sleep") == 0
    gate.limit.share = 5000
    gate.launch()
    assert gate.number("spun") == 25 * US
    assert gate.number("longest_sleep") == 40 * US


def test_kappa_multiplies_costs_within_bounds(gate: Gate) -> None:
    while gate.launch() == 0:
        pass
    for kappa, factor in ((KAPPA, 1), (KAPPA * 4, 4), (KAPPA // 4, 1 / 4), (0, 1 / 16)):
        gate.limit.kappa = kappa
        gate.launch()
        assert gate.launch() == 2 * UNKNOWN * factor
    gate.limit.kappa = 2**32 - 1
    gate.launch()
    assert gate.launch() == 2 * UNKNOWN * 16


# ---- changes while a launch waits


def test_a_group_that_gets_the_whole_gpu_stops_waiting_within_100_ms(tmp_path: Path) -> None:
    gate = Gate(tmp_path, share=100)
    gate.gpu.tat, gate.gpu.tat_share = gate.now + 50 * S, 100
    sleeps: list[int] = []

    def change(then: int) -> None:
        sleeps.append(then)
        if len(sleeps) == 3:
            gate.limit.share = WHOLE

    gate.while_sleeping(change)
    assert gate.launch() == 300 * MS


def test_debt_shrinks_as_the_share_grows_and_grows_as_it_shrinks(tmp_path: Path) -> None:
    gate = Gate(tmp_path, share=100)
    gate.gpu.tat, gate.gpu.tat_share = gate.now + 50 * S, 100
    gate.limit.share = 5000
    assert gate.launch() == S
    gate.gpu.tat = gate.now + S
    gate.limit.share = 500
    assert gate.launch() == 10 * S
    assert gate.gpu.tat_share == 500


def test_a_share_that_grows_while_a_launch_waits_counts_at_once(tmp_path: Path) -> None:
    gate = Gate(tmp_path, share=100)
    gate.gpu.tat, gate.gpu.tat_share = gate.now + 50 * S, 100
    gate.while_sleeping(lambda _: setattr(gate.limit, "share", 5000))
    assert gate.launch() == pytest.approx(100 * MS + (50 * S - 100 * MS) / 50, rel=0.001)


def test_a_cap_that_is_lowered_counts_at_once(gate: Gate) -> None:
    gate.gpu.tat = gate.now + 50 * S
    gate.limit.most_debt_ns = S
    assert gate.launch() == S


def test_no_share_at_all_is_the_least_that_there_is(gate: Gate) -> None:
    gate.limit.share = 0
    gate.launch()
    assert gate.debt == UNKNOWN * WHOLE - 20 * MS


# ---- clocks that jump, and what a tenant writes


@pytest.mark.parametrize("jump", [3600 * S, -900 * S])
def test_a_clock_that_jumps_delays_no_launch_by_more_than_the_cap(gate: Gate, jump: int) -> None:
    for _ in range(1000):
        gate.launch()
    gate.now += jump
    assert gate.launch() <= 60 * S
    gate.now += S
    waits = [gate.launch() for _ in range(1000)]
    assert max(waits) == 2 * UNKNOWN


@pytest.mark.parametrize("tat", [2**64 - 1, 2**63, 1])
@pytest.mark.parametrize("tat_share", [0, 1, 2**64 - 1])
def test_a_group_that_spoils_its_region_waits_no_longer_than_the_cap(
    gate: Gate, tat: int, tat_share: int
) -> None:
    gate.gpu.tat, gate.gpu.tat_share = tat, tat_share
    gate.gpu.longest_at = gate.gpu.backlogged_at = 2**64 - 1
    assert gate.launch() <= 60 * S
    gate.now += S
    assert gate.launch() == 0


def test_the_clock_of_a_machine_that_has_just_started_is_no_burst(tmp_path: Path) -> None:
    gate = Gate(tmp_path, now=5 * MS, measures=False)
    launches = [gate.launch() for _ in range(1000)]
    assert launches.count(0) == 5 * MS // (2 * UNKNOWN) + 1


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


def test_a_group_that_only_works_on_another_gpu_does_not(measuring: Gate) -> None:
    measuring.know(2, 100 * MS)
    measuring.launch(2, 3600 * S, stream=1, other=True)
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


# ---- what the agent sees


def test_the_region_tells_that_launches_wait_and_for_how_long(gate: Gate) -> None:
    while gate.launch() == 0:
        pass
    throttled, waited = gate.gpu.throttled, gate.gpu.wait_ns
    assert (throttled, waited) == (1, 2 * UNKNOWN)
    before = gate.now
    gate.launch()
    assert gate.gpu.backlogged_at == before
    assert (gate.gpu.throttled, gate.gpu.wait_ns) == (2, 4 * UNKNOWN)


def test_a_launch_that_waits_for_long_says_so_again_each_100_ms(gate: Gate) -> None:
    gate.gpu.tat = gate.now + S
    seen: list[int] = []
    gate.while_sleeping(lambda then: seen.append(then - gate.gpu.backlogged_at))
    gate.launch()
    assert seen == [100 * MS] * 10


def test_the_longest_kernel_of_the_last_half_minute_is_told(measuring: Gate) -> None:
    measuring.know(1, 300 * MS)
    measuring.know(2, 2 * MS)
    measuring.launch(1, 300 * MS)
    measuring.now += 100 * S
    measuring.launch(1, 300 * MS)
    measuring.now += S
    measuring.launch(2, 2 * MS)
    assert measuring.gpu.longest_ns == pytest.approx(300 * MS, rel=0.01)
    measuring.now += 31 * S
    measuring.launch(2, 2 * MS)
    assert measuring.gpu.longest_ns == pytest.approx(2 * MS, rel=0.01)


# ---- estimates


def _estimate(measuring: Gate, what: int, ns: int, kind: int = 0) -> int:
    """What the gate takes one launch for, ns, from its price."""
    measuring.now += 600 * S
    before = measuring.now
    measuring.launch(what, ns, kind=kind)
    return (int(measuring.gpu.tat) - (before - 20 * MS)) // 2


@pytest.mark.parametrize("ns", [US, 3 * US, 20 * US, MS, 50 * MS, S, 10 * S])
def test_a_kernel_costs_what_it_takes_once_it_was_measured(measuring: Gate, ns: int) -> None:
    assert _estimate(measuring, 1, ns) == UNKNOWN
    measuring.know(1, ns)
    assert _estimate(measuring, 1, ns) == pytest.approx(ns, rel=0.01, abs=16)


def test_kernels_and_graphs_are_estimated_by_handle(measuring: Gate) -> None:
    measuring.know(1, MS)
    measuring.know(2, 7 * MS, kind=GRAPH)
    assert _estimate(measuring, 1, MS) == pytest.approx(MS, rel=0.01)
    assert _estimate(measuring, 2, 7 * MS, GRAPH) == pytest.approx(7 * MS, rel=0.01)
    assert _estimate(measuring, 3, MS) == UNKNOWN


def test_the_first_launch_alone_says_nothing_since_the_driver_may_load_code_in_it(
    measuring: Gate,
) -> None:
    measuring.launch(1, 300 * MS)
    measuring.now += S
    measuring.launch(1, MS)
    assert measuring.gpu.tat - (measuring.now - 20 * MS) == 2 * UNKNOWN
    measuring.now += S
    for _ in range(3):
        measuring.launch(1, MS)
        measuring.now += S
    assert _estimate(measuring, 1, MS) == pytest.approx(MS, rel=0.01)


def test_the_first_four_launches_are_timed_and_then_every_64th(measuring: Gate) -> None:
    timed = []
    for _ in range(300):
        before = measuring.number("created_events")
        measuring.launch(1, US)
        timed.append(measuring.number("created_events") > before)
        measuring.now += MS
    assert [index for index, yes in enumerate(timed) if yes] == [0, 1, 2, 3, 64, 128, 192, 256]


def test_time_slices_of_others_in_some_measurements_do_not_count(measuring: Gate) -> None:
    measuring.know(1, MS)
    for index in range(64 * 20):
        slow = index // 64 % 2 == 0  # every other one that is timed
        measuring.launch(1, 40 * MS if slow else MS)
        measuring.now = max(measuring.now, measuring.number("stream_free")) + 40 * MS
    assert _estimate(measuring, 1, MS) == pytest.approx(MS, rel=0.05)


def test_an_estimate_follows_a_kernel_whose_work_changes(measuring: Gate) -> None:
    measuring.know(1, MS)
    for _ in range(64 * 60):
        measuring.launch(1, 10 * MS)
        measuring.now = max(measuring.now, measuring.number("stream_free")) + 40 * MS
    assert _estimate(measuring, 1, 10 * MS) == pytest.approx(10 * MS, rel=0.05)


def test_after_four_launches_a_function_waits_for_its_first_measurement_and_pays_for_them(
    measuring: Gate,
) -> None:
    assert [measuring.launch(1, 50 * MS) for _ in range(4)] == [0] * 4
    paid = 4 * 50 * MS * 2 - 20 * MS
    assert measuring.launch(1, 50 * MS) == pytest.approx(paid, rel=0.01)


def test_a_function_whose_kernels_do_not_end_is_held_back_by_a_second_each(
    measuring: Gate,
) -> None:
    launches = [measuring.launch(1, 30 * S) for _ in range(10)]
    assert launches[:4] == [0] * 4
    assert launches[4:] == pytest.approx([S] * 6, rel=0.01)
    measuring.now += 61 * S  # two of them end
    assert measuring.launch(1, 30 * S) == 60 * S


def test_other_functions_do_not_wait_for_the_measurement_of_one(measuring: Gate) -> None:
    for _ in range(4):
        measuring.launch(1, 30 * S)
    assert [measuring.launch(2, US) for _ in range(4)] == [0] * 4


def test_an_unmeasured_kernel_of_nccl_waits_for_nothing(measuring: Gate) -> None:
    measuring.name(function=b"ncclDevKernel_Generic")
    assert [measuring.launch(1, 30 * S) for _ in range(10)] == [0] * 10


def test_more_functions_than_the_table_holds_are_still_estimated(measuring: Gate) -> None:
    for what in range(1, 5000):
        measuring.launch(what * 64, US)
        measuring.now += MS
    measuring.know(64, 5 * MS)
    assert _estimate(measuring, 64, 5 * MS) == pytest.approx(5 * MS, rel=0.01)


# ---- events


def test_no_event_is_left_once_launches_are_measured(measuring: Gate) -> None:
    for what in range(1, 200):
        measuring.know(what, 10 * US)
    measuring.launch(1, US)
    assert measuring.number("live_events") == 0


def test_events_are_looked_at_while_a_launch_waits(measuring: Gate) -> None:
    for _ in range(4):
        measuring.launch(1, MS)
    measuring.gpu.tat = measuring.now + S
    measuring.launch(2, MS)
    assert measuring.number("live_events") == 2  # of the last launch


def test_events_go_with_their_context(measuring: Gate) -> None:
    for what in range(1, 10):
        measuring.launch(what, S)
    assert measuring.number("live_events") == 18
    measuring.forget_events()
    assert measuring.number("live_events") == 0
    measuring.know(1, MS)
    assert _estimate(measuring, 1, MS) == pytest.approx(MS, rel=0.01)


def test_there_are_never_more_events_than_fit(measuring: Gate) -> None:
    for what in range(1, 500):
        measuring.launch(what, S)
    assert measuring.number("live_events") == 128


def test_a_launch_that_fails_leaves_no_event_and_no_estimate(measuring: Gate) -> None:
    for _ in range(10):
        measuring.launch(1, result=700)
        measuring.now += MS
    assert measuring.number("live_events") == 0
    assert _estimate(measuring, 1, MS) == UNKNOWN


def test_an_event_that_reports_an_error_is_no_measurement(measuring: Gate) -> None:
    measuring.set("query_result", 700)
    measuring.know(1, MS)
    assert measuring.number("live_events") == 0
    assert _estimate(measuring, 1, MS) == UNKNOWN


# ---- capture, and kernels that must not wait


def test_a_launch_that_is_captured_waits_for_nothing_and_costs_nothing(gate: Gate) -> None:
    gate.gpu.tat = tat = gate.now + S
    gate.set("capturing", 1)
    assert [gate.launch(1, MS) for _ in range(200)] == [0] * 200
    assert gate.gpu.tat == tat
    assert gate.number("created_events") == 0


def test_events_of_earlier_launches_are_left_alone_while_a_stream_captures(measuring: Gate) -> None:
    measuring.launch(1, MS)
    measuring.now += S
    measuring.set("capturing", 1)
    measuring.launch(1, MS)
    assert measuring.number("illegal_calls") == 0
    measuring.set("capturing", 0)
    measuring.launch(1, MS)
    assert measuring.number("illegal_calls") == 0  # the thread said that it knows what it does


def test_the_graph_pays_when_it_is_launched(measuring: Gate) -> None:
    measuring.know(9, 30 * MS, kind=GRAPH)
    assert measuring.launch(9, 30 * MS, kind=GRAPH) == 0
    assert measuring.launch(9, 30 * MS, kind=GRAPH) > 30 * MS


@pytest.mark.parametrize(
    "name", [b"ncclDevKernel_Generic", b"_Z27ncclDevKernel_AllGather_LL24ncclDevKernelArgsStorage"]
)
@pytest.mark.parametrize("by", ["function", "kernel"])
def test_kernels_of_nccl_pay_and_never_wait(gate: Gate, name: bytes, by: str) -> None:
    gate.name(**{by: name})
    gate.gpu.tat = gate.now + S
    assert [gate.launch(1, MS) for _ in range(10)] == [0] * 10
    assert gate.debt == S + 10 * 2 * UNKNOWN
    gate.name(function=b"matmul")
    assert gate.launch(2, MS) > 0


@pytest.mark.parametrize("name", [b"myncclKernel", b"_Z12my_nccl_copyPf", b"_Znccl", b"", b"_Z4"])
def test_other_kernels_wait_like_all(gate: Gate, name: bytes) -> None:
    gate.name(function=name)
    gate.gpu.tat = gate.now + S
    assert gate.launch(1, MS) == (0 if name == b"_Znccl" else S)
