"""The gate of compute shares: who waits, for how long, and what that costs the group."""

from pathlib import Path

import pytest

from tests.gpu.gate import GRAPH, KAPPA, MS, UNKNOWN, US, WHOLE, Gate, S

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


def test_debt_is_at_most_the_cap_and_who_waited_for_that_lets_no_other_go(tmp_path: Path) -> None:
    """A kernel of 10 s with a hundredth of a GPU would have to pay for 1000 s."""
    gate = Gate(tmp_path, share=100)
    gate.know(1, 10 * S)
    assert gate.launch(1, 10 * S) == 0
    assert gate.debt == 60 * S
    before = gate.gpu.throttled
    assert [gate.launch(1, 10 * S) for _ in range(5)] == [60 * S] * 5
    assert gate.gpu.throttled == before + 5
    assert gate.number("longest_sleep") <= 100 * MS


def test_short_waits_spin_and_long_ones_sleep(tmp_path: Path) -> None:
    gate = Gate(tmp_path, share=8000, measures=False)
    while gate.launch() == 0:
        pass
    assert gate.number("spun") == 25 * US
    assert gate.number("longest_sleep") == 0
    gate.limit.share = 5000
    gate.launch()  # waits for what is owed still
    spun = gate.number("spun")
    gate.launch()
    assert (gate.number("spun"), gate.number("longest_sleep")) == (spun, 40 * US)


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
    gate.gpu.tat = gate.now + 50 * S
    sleeps: list[int] = []

    def change(then: int) -> None:
        sleeps.append(then)
        if len(sleeps) == 3:
            gate.limit.share = WHOLE

    gate.while_sleeping(change)
    assert gate.launch() == 300 * MS


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
def test_a_group_that_spoils_its_region_waits_no_longer_than_the_cap(gate: Gate, tat: int) -> None:
    gate.gpu.tat = tat
    gate.gpu.longest_at = gate.gpu.backlogged_at = 2**64 - 1
    assert gate.launch() <= 60 * S
    gate.now += S
    assert gate.launch() == 0


def test_the_clock_of_a_machine_that_has_just_started_is_no_burst(tmp_path: Path) -> None:
    gate = Gate(tmp_path, now=5 * MS, measures=False)
    launches = [gate.launch() for _ in range(1000)]
    assert launches.count(0) == 5 * MS // (2 * UNKNOWN) + 1


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
    """The time in ns that the gate assumes for one launch, from its price."""
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


@pytest.mark.parametrize("queued", [0, 100 * MS])
def test_events_and_the_call_of_a_launch_are_no_time_of_the_gpu(
    measuring: Gate, queued: int
) -> None:
    for _ in range(8):
        if queued:
            measuring.launch(2, queued)
        measuring.launch(1, 10 * US)
        measuring.now = max(measuring.now, measuring.number("stream_free")) + S
    assert _estimate(measuring, 1, 10 * US) == pytest.approx(10 * US, rel=0.01)


def test_a_program_whose_gpu_waits_for_launches_is_not_held_back(tmp_path: Path) -> None:
    """An empty kernel takes an H200 1.4 us, and a launch of one 3.7 us of a CPU."""
    gate = Gate(tmp_path, share=9900)
    gate.know(1, 1400)
    gate.gpu.tat = gate.now  # nothing is left of the burst
    for _ in range(1000):
        assert gate.launch(1, 1400) == 0
        gate.now += 3700


def test_the_first_four_launches_are_timed_and_then_every_256th(measuring: Gate) -> None:
    timed = []
    for _ in range(800):
        before = measuring.number("created_events")
        measuring.launch(1, US)
        timed.append(measuring.number("created_events") > before)
        measuring.now += MS
    assert [index for index, yes in enumerate(timed) if yes] == [0, 1, 2, 3, 256, 512, 768]


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
