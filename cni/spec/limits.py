"""The limits of a network configuration (docs/reference/configuration.md).

Tenants choose the size of a configuration, and one agent reads all configurations of a node. So all
code decodes configurations through this module:

- `decode` refuses a configuration that exceeds the limits. ADD, CHECK and STATUS use `decode`.
- `require_readable` refuses only nesting that would overflow the stack and end the agent. DEL and
  GC use `require_readable`, so that a removal is hardly ever refused.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import msgspec

from cni.spec.errors import CNIError, Code, invalid_config

MAX_BYTES = 1 << 20
MAX_VALUES = 10_000
MAX_DEPTH = 32
MAX_KEY = 256  # characters
MAX_TEXT = 16 << 10  # characters
MAX_ESCAPES = 1 << 16  # backslashes
MAX_KEYS = 64  # at the top, apart from the plugin's own keys and the runtime's
MAX_ARGS = 16 << 10  # characters of CNI_ARGS

# Entries of the lists of a configuration or a result.
ADDRESSES = 64
RANGE_SETS = 64
RANGES = 256  # of all sets together
EXCLUSIONS = 1024  # of all ranges together
ROUTES = 256
DNS_ENTRIES = 64
MASTERS = 64
INTERFACES = 256  # of a result
RESULT_ADDRESSES = 256  # of a result, from all plugins of a chain together

_LONGEST_INTEGER = 308  # characters; a longer integer may be too large for a float
MAX_PATH = 100  # characters of a path in an error
READABLE_DEPTH = 512
_PART = 16 << 10  # bytes
_BLOCK = 256
_STEP = [0] * 256
_STEP[ord("[")] = _STEP[ord("{")] = 1
_STEP[ord("]")] = _STEP[ord("}")] = -1
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def require_readable(raw: bytes) -> None:
    """Raise CNIError 6 for JSON whose nesting could overflow the decoder's stack."""
    if raw.count(b"[") + raw.count(b"{") > READABLE_DEPTH:
        depth_of(raw, READABLE_DEPTH, len(raw))


def decode(raw: bytes) -> object:
    """The JSON value of `raw`. A number that does not fit a float is a msgspec.Raw of its text.

    Raises CNIError 7 if `raw` exceeds a limit or has a key twice, 6 if `raw` is not JSON.
    """
    if len(raw) > MAX_BYTES:
        raise invalid_config(
            f"the configuration has {len(raw)} bytes, at most {MAX_BYTES} are allowed: "
            "shorten the configuration"
        )
    if raw.count(b"\\") > MAX_ESCAPES:
        raise invalid_config(
            f"the configuration has more than {MAX_ESCAPES} backslashes: remove backslashes"
        )
    # A smaller configuration exceeds neither MAX_TEXT nor MAX_VALUES.
    if len(raw) > MAX_TEXT or raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:
        depth_of(raw, MAX_DEPTH, MAX_VALUES)
    try:
        document = _DECODER.decode(raw.decode())
    except (ValueError, RecursionError) as error:
        raise not_decoded(error) from None
    _refuse_first_wrong(document)
    return document


def not_decoded(reason: object) -> CNIError:
    """CNIError 6, for a configuration that is not a JSON object."""
    return CNIError(
        Code.DECODING_FAILURE,
        f"the network configuration cannot be read as a JSON object: {reason}",
    )


def depth_of(raw: bytes, allowed: int, most_values: int, part: int = _PART) -> int:
    """The depth to which JSON is nested. May return 0 for a depth up to `allowed`.

    Raises CNIError 6 beyond READABLE_DEPTH, 7 beyond `most_values` values. Reads `part` bytes at a
    time, so that other threads run in between.
    """
    depth = deepest = values = strings = 0
    for outside, inside in _parts_of(raw, part):
        strings += inside
        brackets = outside.translate(None, _NO_BRACKETS)
        for start in range(0, len(brackets), _BLOCK):
            block = brackets[start : start + _BLOCK]
            opening = block.count(b"[") + block.count(b"{")
            if depth + opening > allowed:
                deepest = max(deepest, *accumulate(map(_STEP.__getitem__, block), initial=depth))
                if deepest > READABLE_DEPTH:
                    raise not_decoded("it is nested too deeply")
            depth += 2 * opening - len(block)
        values += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        if values > most_values or strings > 2 * most_values + 1:  # each value may have a key
            raise invalid_config(
                f"the configuration holds more than {most_values} JSON values: shorten the lists"
            )
    return deepest


def _parts_of(raw: bytes, size: int) -> Iterator[tuple[bytes, int]]:
    """Yield the JSON text in parts, without strings.

    Each part comes with the number of strings that ended in the part.
    """
    in_string = False
    rest = b""
    for start in range(0, len(raw), size):
        part = rest + raw[start : start + size]
        rest = b""
        if (
            len(part) - len(part.rstrip(b"\\"))
        ) % 2:  # the last one escapes a character of the next part
            part, rest = part[:-1], b"\\"
        between_quotes = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b" ".join(between_quotes[in_string::2]), (len(between_quotes) - 1 + in_string) // 2
        in_string ^= len(between_quotes) % 2 == 0


class _Twice(dict[str, Any]):
    """An object that has `key` twice."""

    key = ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) == len(pairs):
        return values
    twice = _Twice(values)
    twice.key = Counter(key for key, _ in pairs).most_common(1)[0][0]
    return twice


def _float(text: str) -> float | msgspec.Raw:
    number = float(text)
    return msgspec.Raw(text) if math.isinf(number) else number


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


# json and not msgspec, which silently keeps the last of two equal keys.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_object,
    parse_int=lambda text: int(text) if len(text) <= _LONGEST_INTEGER else msgspec.Raw(text),
    parse_float=_float,
    parse_constant=_refuse_constant,
)

_Path = tuple["_Path | None", str | int]


def _refuse_first_wrong(document: object) -> None:
    waiting: list[tuple[object, _Path | None, int]] = [(document, None, 0)]
    while waiting:
        value, path, depth = waiting.pop()
        if isinstance(value, str | msgspec.Raw):
            if len(value) > MAX_TEXT:
                raise invalid_config(
                    f'"{_shown(path)}" has {len(value)} characters, at most {MAX_TEXT} are '
                    "allowed: shorten the text"
                )
        elif isinstance(value, dict | list):
            if depth == MAX_DEPTH:
                raise invalid_config(
                    f'"{_shown(path)}" is nested more than {MAX_DEPTH} deep: remove levels'
                )
            if isinstance(value, dict):
                _refuse_keys(value, path)
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [(entry, (path, key), depth + 1) for key, entry in entries]


def _refuse_keys(value: dict[str, Any], path: _Path | None) -> None:
    if isinstance(value, _Twice):
        raise invalid_config(f'"{_shown((path, value.key))}" occurs twice: remove one of them')
    for key in value:
        if len(key) > MAX_KEY:
            raise invalid_config(
                f'"{_shown((path, key))}": the key has {len(key)} characters, at most '
                f"{MAX_KEY} are allowed: shorten the key"
            )


def _shown(path: _Path | None) -> str:
    """A path such as `ipam.ranges[0][1].subnet`. Only the end of a long path is shown."""
    shown = ""
    while path is not None and len(shown) < MAX_PATH:
        path, key = path
        shown = (f"[{key}]" if isinstance(key, int) else f".{key[:MAX_PATH]}") + shown
    beginning = "" if path is None and len(shown) <= MAX_PATH else "..."
    return beginning + shown[-MAX_PATH:].removeprefix(".")
