"""Which ids of a resource go best together: those of one GPU, as far as that is possible."""

from collections import Counter
from collections.abc import Mapping, Sequence


def together(
    of: Mapping[str, str],
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
    held: Mapping[str, int],
    *,
    spread: bool,
) -> list[str]:
    """`size` different ids of `available`, fewer only if there are fewer. Never fails.

    Args:
        of: the GPU of each id. Ids without one come last.
        held: how many ids of each GPU other containers hold.
        spread: of GPUs with enough free ids, take the one with the fewest holders; otherwise the
            one with the most.

    The available ids of `must_include` come first; their GPU is taken before others.
    """
    free = dict.fromkeys(available)
    chosen = [device_id for device_id in dict.fromkeys(must_include) if device_id in free]
    chosen = chosen[: max(size, 0)]
    by_gpu: dict[str, list[str]] = {}
    for device_id in sorted(set(free).difference(chosen), key=_order):
        by_gpu.setdefault(of.get(device_id, ""), []).append(device_id)
    unknown = by_gpu.pop("", [])
    taken = Counter(of[device_id] for device_id in chosen if device_id in of)
    wanted = size - len(chosen)

    def order(gpu: str) -> tuple[int, int, int, tuple[str, int]]:
        load = held.get(gpu, 0)
        enough = min(len(by_gpu[gpu]), wanted)
        return -taken[gpu], -enough, load if spread else -load, _order(gpu)

    ranked = (device_id for gpu in sorted(by_gpu, key=order) for device_id in by_gpu[gpu])
    return [*chosen, *ranked, *unknown][: max(size, 0)]


def _order(text: str) -> tuple[str, int]:
    """By name, then number: "nvidia0-_-9" before "nvidia0-_-10"."""
    name = text.rstrip("0123456789")
    number = text[len(name) :]
    return name, int(number) if number and len(number) < 10 else -1
