"""Shares of GPUs, and the choice of the GPU for a container.

A container's shares are always of one GPU. A GPU has 100 percent of time.
"""

from collections.abc import Mapping

import msgspec

WHOLE = 100  # percent of a GPU's time


class Share(msgspec.Struct, frozen=True):
    """Memory and time of a GPU: of an id, of a container, or free."""

    memory: int = 0  # bytes
    compute: int = 0  # percent

    def __mul__(self, count: int) -> "Share":
        return Share(self.memory * count, self.compute * count)

    def __add__(self, other: "Share") -> "Share":
        return Share(self.memory + other.memory, self.compute + other.compute)

    def __sub__(self, other: "Share") -> "Share":
        return Share(self.memory - other.memory, self.compute - other.compute)

    def holds(self, other: "Share") -> bool:
        return other.memory <= self.memory and other.compute <= self.compute

    def count(self, other: "Share") -> int:
        """How often the other share, which must not be empty, fits."""
        counts = []
        if other.memory:
            counts.append(self.memory // other.memory)
        if other.compute:
            counts.append(self.compute // other.compute)
        return max(min(counts), 0)

    def __str__(self) -> str:
        return f"{self.memory / 2**30:.4g} GiB and {self.compute} %"


def choose(
    free: Mapping[str, Share],
    request: Share,
    *,
    spread: bool,
    costs: Mapping[str, int] | None = None,
) -> str | None:
    """The address of the GPU for a container; `None` if the request fits on none.

    Args:
        free: the free share of each GPU, by address.
        spread: at equal costs prefer the GPU with the most free memory, else the least.
        costs: the distance of each GPU from the container's HCAs; 0 by default.
    """

    def order(address: str) -> tuple[int, int, int, str]:
        share = free[address]
        sign = -1 if spread else 1
        cost = costs.get(address, 0) if costs else 0
        return cost, sign * share.memory, sign * share.compute, address

    fitting = [address for address, share in free.items() if share.holds(request)]
    return min(fitting, key=order, default=None)
