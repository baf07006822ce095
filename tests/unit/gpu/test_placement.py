"""Parts of GPUs as values: what fits, and which GPU is chosen."""

from hypothesis import given
from hypothesis import strategies as st

from gpu.pools.share_pool import Share, choose

GIB = 1 << 30


def test_slices_fit_by_memory_and_by_time() -> None:
    assert Share(80 * GIB, 100).count(Share(10 * GIB, 25)) == 4
    assert Share(80 * GIB, 100).count(Share(30 * GIB, 10)) == 2
    assert Share(80 * GIB - 1, 100).count(Share(GIB)) == 79
    assert Share(-GIB, 100).count(Share(GIB, 1)) == 0


def test_pack_takes_the_fullest_gpu_and_spread_the_emptiest() -> None:
    free = {"a": Share(8, 100), "b": Share(4, 100), "c": Share(2, 100)}
    assert choose(free, Share(3), spread=False) == "b"
    assert choose(free, Share(3), spread=True) == "a"
    assert choose(free, Share(9), spread=True) is None


def test_distance_comes_before_room() -> None:
    free = {"a": Share(8, 100), "b": Share(4, 100)}
    assert choose(free, Share(3), spread=False, costs={"a": 1, "b": 20}) == "a"
    assert choose(free, Share(3), spread=False, costs={"a": 1, "b": 1}) == "b"


@given(
    st.dictionaries(st.text("ab", max_size=3), st.tuples(st.integers(-5, 9), st.integers(-5, 9))),
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.booleans(),
)
def test_chosen_gpu_has_room(
    rooms: dict[str, tuple[int, int]], wanted: tuple[int, int], spread: bool
) -> None:
    free = {address: Share(*room) for address, room in rooms.items()}
    chosen = choose(free, Share(*wanted), spread=spread)
    if chosen is None:
        assert not any(room.holds(Share(*wanted)) for room in free.values())
    else:
        assert free[chosen].holds(Share(*wanted))
