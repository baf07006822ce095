"""The lines that GPU benches print: one for each figure, with its target and whether it is met.

A line is "ROW what: figure | target | ok, miss, or skipped: why". A figure that is compared with
the same call without the libraries of gpu/shim is what is added to it, and (x1.17) is the ratio.
"""

from collections.abc import Sequence


def line(row: str, what: str, value: str, target: str, verdict: bool | str) -> None:
    """Print a result. A text as the verdict says why it was skipped."""
    said = f"skipped: {verdict}" if isinstance(verdict, str) else "ok" if verdict else "miss"
    print(f"{row:4} {what}: {value} | {target} | {said}", flush=True)


def figure(
    row: str, what: str, value: float, unit: str, target: float, ratio: float | None = None
) -> None:
    """Print a number that should be no more than its target."""
    shown = f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"
    compared = f" (x{ratio:.2f})" if ratio is not None else ""
    line(row, what, f"{shown} {unit}{compared}", f"{target:g} {unit}", value <= target)


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that so many of a hundred do not exceed."""
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]
