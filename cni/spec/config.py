"""Strict checks of a plugin's configuration: every error names the key and the remedy."""

import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import msgspec

from base.text import resembling
from base.types import PKey
from cni.spec.errors import CNIError, invalid_config
from cni.spec.limits import MAX_KEYS

T = TypeVar("T")

_TOO_LONG = re.compile(r"Expected `array` of length <= (\d+)")
_TOO_LARGE = re.compile(
    r"Expected `[^`]*`, got `raw`"
)  # what `limits.decode` makes of such a number

# Keys of the runtime, libcni and Multus, which the configuration of any plugin may have
# (SPEC.md section 1).
RUNTIME_KEYS = frozenset(
    (
        "cniVersion",
        "cniVersions",
        "name",
        "type",
        "args",
        "capabilities",
        "runtimeConfig",
        "prevResult",
        "ipam",
        "dns",
        "ipMasq",
        "disableCheck",
        "disableGC",
        "deviceID",
        "pciBusID",
    )
)


def convert(value: Any, shape: type[T], path: str = "$") -> T:  # noqa: ANN401 - any JSON value
    """The decoded JSON value at `path` as `shape`. CNIError 7 names the path of what does not fit.

    "$" is the whole configuration.
    """
    try:
        return msgspec.convert(value, type=shape)
    except msgspec.MsgspecError as error:
        raise _explained(error, path) from None


def unknown_key(key: str, valid: Collection[str], where: str) -> CNIError:
    """The error for a key that podfabric does not know, with the valid key it resembles."""
    nearest = resembling(key, valid)
    hint = f'did you mean "{nearest}"?' if nearest else f"valid keys are {', '.join(sorted(valid))}"
    return invalid_config(f'{where}unknown key "{key}": {hint}')


def refuse_misspelt(keys: Mapping[str, Any], ours: Collection[str]) -> None:
    """Raise CNIError 7 for a top-level key that looks like a misspelt one of `ours`.

    Other unknown keys pass: other plugins and the runtime own them (SPEC.md). But ignoring
    `"pkeys"` would put a pod into the wrong partition.
    """
    valid = frozenset(ours) | RUNTIME_KEYS
    others = [key for key in keys if key not in valid and "/" not in key]
    if len(others) > MAX_KEYS:  # each is compared with each of ours
        raise invalid_config(
            f"the configuration has {len(others)} keys that are neither this plugin's nor the "
            f"runtime's, at most {MAX_KEYS} are allowed: remove them"
        )
    for key in others:
        if resembling(key, ours):
            raise unknown_key(key, ours, "")


def require_interface_name(name: str, key: str) -> None:
    """Raise CNIError 7 if `name`, the value at `key`, cannot be the name of a Linux interface."""
    size = len(name.encode(errors="replace"))
    if not 0 < size <= 15 or "/" in name or "\0" in name or name in (".", ".."):
        raise invalid_config(f'"{key}": "{name}" cannot be the name of an interface')


def _explained(error: msgspec.MsgspecError, path: str) -> CNIError:
    """msgspec says "Expected `int`, got `str` - at `$.mtu`": put the key first."""
    said = _TOO_LONG.sub(r"at most \1 entries are allowed: shorten the list", str(error))
    said = _TOO_LARGE.sub("Number out of range", said)
    text, separator, inner = said.rpartition(" - at `")
    if not separator:
        if path == "$":
            return invalid_config(f"invalid configuration: {said}")
        text, inner = said, "$`"
    key = (path + inner.rstrip("`").removeprefix("$")).removeprefix("$.")
    return invalid_config(f'invalid configuration: "{key}": {text.replace("`", "")}')


def pkey(written: int | str | None) -> PKey | None:
    """A P_Key with or without the full-member bit; None if it is not given.

    CNIError 7 for anything else, and for 0 and 0x8000, which the kernel refuses.
    """
    if written is None or written == "":
        return None
    text = str(written)
    if not re.fullmatch(r"0[xX][0-9a-fA-F]{1,4}|[0-9]{1,5}", text):
        raise invalid_config(
            f'"pkey": "{text}" is not a P_Key: write it as a string such as "0x8001", or a number'
        )
    number = int(text, 16) if text[:2] in ("0x", "0X") else int(text)
    if number & 0x7FFF == 0 or number > 0xFFFF:
        raise invalid_config(
            f'"pkey": {text} is out of range: 0x0001 to 0x7fff, or 0x8001 to 0xffff with the '
            "bit of a full member"
        )
    return PKey(number)
