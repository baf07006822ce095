"""Visits every state that a protocol can reach, breadth-first, so a found trace is a shortest one.

A model is a first state, a function that yields each possible step from a state (its name, and the
state after it), and invariants: predicates of a state. States are hashable.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Generic, NamedTuple, TypeVar

State = TypeVar("State", bound=Hashable)

Step = tuple[str, State]
Steps = Callable[[State], Iterable[Step[State]]]
Holds = Callable[[State], bool]


class Explored(NamedTuple, Generic[State]):
    """Every state `reached`, with the step that reached it first.

    If an invariant is broken, `broken` is its name and `trace` a shortest way there. The states are
    those visited before.
    """

    reached: Mapping[State, tuple[State, str] | None]
    broken: str = ""
    trace: tuple[str, ...] = ()


def explore(
    first: State, steps: Steps[State], invariants: Mapping[str, Holds[State]]
) -> Explored[State]:
    """Every reachable state, or those up to the first that breaks an invariant."""
    reached: dict[State, tuple[State, str] | None] = {first: None}
    wave = [first]
    while wave:
        next_wave: list[State] = []
        for before in wave:
            for name, after in steps(before):
                if after in reached:
                    continue
                reached[after] = (before, name)
                for invariant, holds in invariants.items():
                    if not holds(after):
                        return Explored(reached, invariant, _trace(reached, after))
                next_wave.append(after)
        wave = next_wave
    return Explored(reached)


def without_way_to(
    good: Holds[State], reached: Iterable[State], steps: Steps[State]
) -> list[State]:
    """The states from which these steps lead to no good state."""
    every = list(reached)
    before: dict[State, list[State]] = {}
    for state in every:
        for _, after in steps(state):
            before.setdefault(after, []).append(state)
    on_the_way = [state for state in every if good(state)]
    with_way = set(on_the_way)
    while on_the_way:
        for state in before.get(on_the_way.pop(), ()):
            if state not in with_way:
                with_way.add(state)
                on_the_way.append(state)
    return [state for state in every if state not in with_way]


def _trace(reached: Mapping[State, tuple[State, str] | None], last: State) -> tuple[str, ...]:
    names: list[str] = []
    came_from = reached[last]
    while came_from is not None:
        last, name = came_from
        names.append(name)
        came_from = reached[last]
    return tuple(reversed(names))
