"""The conditions of a pool: Ready, Exhausted, Conflict, ReservationsRefused."""

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from ipam.cluster.objects import GROUP, AddressPool, Condition

NAMESPACE = f"{GROUP}/namespace"
"""The label of a pool that was made for a definition: the definition's namespace."""


def is_made(pool: AddressPool) -> bool:
    """Whether the controller made it for a definition, and no person has changed it since."""
    return NAMESPACE in pool.metadata.labels and pool.metadata.generation <= 1


def is_ready(pool: AddressPool) -> bool:
    """Whether the status says that nodes may claim."""
    return any(each.type == "Ready" and each.status == "True" for each in pool.status.conditions)


def ready(reason: str, message: str, *, is_true: bool) -> Condition:
    """Whether nodes may claim."""
    status = "True" if is_true else "False"
    return Condition(type="Ready", status=status, reason=reason, message=message)


def exhausted(free: int) -> Condition:
    """Whether no block is free."""
    if free > 0:
        return Condition(type="Exhausted", status="False", reason="BlocksAreFree")
    return Condition(
        type="Exhausted",
        status="True",
        reason="NoBlockIsFree",
        message="every block is leased: nodes return empty blocks at once",
    )


def conflict(conflicts: Sequence[str]) -> Condition:
    """Whether blocks contradict each other, a sentence for each."""
    if not conflicts:
        return Condition(type="Conflict", status="False", reason="NoConflict")
    return Condition(
        type="Conflict", status="True", reason="BlocksContradict", message=_listed(conflicts)
    )


def reservations_refused(full: str) -> tuple[Condition, ...]:
    """That no further address of the pool is kept for a pod, and why; nothing if `full` is ""."""
    if not full:
        return ()
    return (
        Condition(type="ReservationsRefused", status="True", reason="LimitReached", message=full),
    )


def _listed(sentences: Sequence[str]) -> str:
    more = f"; and {len(sentences) - 3} more" if len(sentences) > 3 else ""
    return "; ".join(sentences[:3]) + more


def dated(pool: AddressPool, conditions: Iterable[Condition], now: str) -> tuple[Condition, ...]:
    """The conditions with the time of their last transition, of this generation of the spec."""
    former = {each.type: each for each in pool.status.conditions}
    dated = []
    for condition in conditions:
        last = former.get(condition.type)
        unchanged = last is not None and last.status == condition.status
        dated.append(
            replace(
                condition,
                last_transition_time=last.last_transition_time if last and unchanged else now,
                observed_generation=pool.metadata.generation,
            )
        )
    return tuple(dated)
