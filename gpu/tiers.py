"""What enforces limits of GPUs: the strongest tier that a node has and its settings allow."""

from collections.abc import Callable, Collection, Mapping
from typing import Literal

import msgspec

Tier = Literal["mig", "kernel", "mps", "shim", "none"]
STRONGEST_FIRST: tuple[Tier, ...] = ("mig", "kernel", "mps", "shim", "none")

BY_CDI: frozenset[Tier] = frozenset({"kernel", "mps"})
"""Tiers that take a CDI device. What the container gets otherwise is that of the tier `shim`."""

Obstacle = Callable[[], str | None]
"""Why a tier cannot be had on a GPU; None if it can."""


class TierChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The tier of one GPU."""

    tier: Tier
    refused: Mapping[Tier, str]  # stronger ones that are allowed, and why they cannot be had
    unhealthy: str | None = None  # why the GPU must not be given; None if it may


class TieredGPU(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that is given in parts, and what keeps the limits on it."""

    uuid: str
    minor: int  # N of /dev/nvidiaN
    choice: TierChoice


def choose(
    obstacles: Mapping[Tier, Obstacle], allowed: Collection[Tier], required: Tier | None = None
) -> TierChoice:
    """The strongest of the allowed tiers that can be had.

    Args:
        obstacles: for each tier that this version has; "none" needs no entry.
        allowed: those that the configuration allows (`enforce`).
        required: the weakest one that may be had (`require`): else the GPU must not be given.
    """
    refused: dict[Tier, str] = {}
    for tier in STRONGEST_FIRST:
        if tier not in allowed:
            continue
        reason = None if tier == "none" else obstacles.get(tier, _not_there)()
        if reason is None:
            return _checked(tier, refused, required)
        refused[tier] = reason
    return _checked("none", refused, required)


def _checked(tier: Tier, refused: Mapping[Tier, str], required: Tier | None) -> TierChoice:
    unhealthy = None
    if required is not None and STRONGEST_FIRST.index(tier) > STRONGEST_FIRST.index(required):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        unhealthy = (
            f"limits must be enforced by {required} or stronger (require), and only {tier} can be "
            f"had: {reasons or f'enforce does not allow {required}'}"
        )
    return TierChoice(tier=tier, refused=refused, unhealthy=unhealthy)


def _not_there() -> str:
    return "this version of podfabric does not have it"
