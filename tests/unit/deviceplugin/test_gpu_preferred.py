"""Which ids of GPUs go together."""

from hypothesis import given
from hypothesis import strategies as st

from gpu.pools.ids import preferred

IDS = {f"nvidia{gpu}-_-{k}": f"nvidia{gpu}" for gpu in range(3) for k in range(1, 12)}


def test_ids_of_one_gpu_are_taken_in_the_order_of_their_numbers() -> None:
    chosen = preferred(IDS, list(IDS), [], 10, {}, spread=True)
    assert chosen == [f"nvidia0-_-{k}" for k in range(1, 11)]


def test_spread_takes_the_gpu_with_the_fewest_holders_and_pack_the_one_with_most() -> None:
    held = {"nvidia0": 2, "nvidia1": 1, "nvidia2": 3}
    assert preferred(IDS, list(IDS), [], 1, held, spread=True) == ["nvidia1-_-1"]
    assert preferred(IDS, list(IDS), [], 1, held, spread=False) == ["nvidia2-_-1"]


def test_gpu_of_the_ids_to_include_comes_first() -> None:
    chosen = preferred(IDS, list(IDS), ["nvidia2-_-5"], 3, {}, spread=True)
    assert chosen == ["nvidia2-_-5", "nvidia2-_-1", "nvidia2-_-2"]


def test_as_few_gpus_as_possible_are_taken() -> None:
    free = ["nvidia0-_-1", "nvidia1-_-1", "nvidia1-_-2"]
    assert preferred(IDS, free, [], 2, {}, spread=True) == ["nvidia1-_-1", "nvidia1-_-2"]
    assert sorted(preferred(IDS, free, [], 3, {}, spread=True)) == free


@given(
    st.lists(st.sampled_from([*IDS, "x", "y9"])),
    st.lists(st.sampled_from([*IDS, "x"])),
    st.integers(-1, 12),
    st.booleans(),
)
def test_any_request_is_answered(
    available: list[str], must: list[str], size: int, spread: bool
) -> None:
    chosen = preferred(IDS, available, must, size, {"nvidia1": 1}, spread=spread)
    assert len(chosen) == len(set(chosen)) == min(max(size, 0), len(set(available)))
    assert set(chosen) <= set(available)
    if len(set(must) & set(available)) <= size:
        assert set(must) & set(available) <= set(chosen)
