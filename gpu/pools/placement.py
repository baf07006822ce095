"""Parts of GPUs: how much of each is free, and which GPU a container best gets.

A share is memory in bytes and time in percent. A GPU has 100 percent. Parts of a container are
always on one GPU: neither memory nor time of two GPUs makes one larger GPU.
"""

from collections.abc import Mapping

import msgspec

WHOLE = 100  # percent of a GPU's time


class Share(msgspec.Struct, frozen=True):
    """Memory and time of a GPU: of one id, of a container, or free."""

    memory: int = 0  # bytes
    compute: int = 0  # percent

    def times(self, count: int) -> "Share":
        """The share of so many ids."""
        return Share(self.memory * count, self.compute * count)

    def plus(self, other: "Share") -> "Share":
        """Both together."""
        return Share(self.memory + other.memory, self.compute + other.compute)

    def minus(self, other: "Share") -> "Share":
        """What is left; negative where too much was given."""
        return Share(self.memory - other.memory, self.compute - other.compute)

    def holds(self, other: "Share") -> bool:
        """Whether the other share fits into this one."""
        return other.memory <= self.memory and other.compute <= self.compute

    def count(self, other: "Share") -> int:
        """How often the other share fits; 0 if not at all. It must not be empty."""
        counts = []
        if other.memory:
            counts.append(self.memory // other.memory)
        if other.compute:
            counts.append(self.compute // other.compute)
        return max(min(counts), 0)

    def __str__(self) -> str:
        return f"{self.memory / 2**30:.4g} GiB and {self.compute} %"


_NO_COSTS: Mapping[str, int] = {}


def choose(
    free: Mapping[str, Share],
    wanted: Share,
    *,
    spread: bool,
    costs: Mapping[str, int] = _NO_COSTS,
) -> str | None:
    """The address of the GPU for a container; None if none has room.

    Args:
        free: what is free of each GPU, by address.
        wanted: what the container asks for.
        spread: between equal costs take the GPU with the most free memory, else with the least.
        costs: how far each GPU is from the container's HCAs; 0 where it is not said.
    """

    def order(address: str) -> tuple[int, int, int, str]:
        room = free[address]
        sign = -1 if spread else 1
        return costs.get(address, 0), sign * room.memory, sign * room.compute, address

    fitting = [address for address, room in free.items() if room.holds(wanted)]
    return min(fitting, key=order, default=None)
