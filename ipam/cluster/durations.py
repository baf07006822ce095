"""Durations as Go writes them: "10m", "1h30m", "1.5s"."""

import re

_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_PART = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|s)")
_WHOLE = re.compile(rf"(?:{_PART.pattern})+")


def seconds(written: str) -> float:
    """The duration in seconds. ValueError if `written` is none."""
    if written == "0":
        return 0.0
    if not _WHOLE.fullmatch(written):
        raise ValueError(f'"{written}" is not a duration: write it as "90s", "10m" or "1h30m"')
    return sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(written))
