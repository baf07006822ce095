"""How much a network configuration may hold. docs/limits.md has the table for users.

Whoever writes a NetworkAttachmentDefinition or annotates a pod chooses how large a configuration
is, and one agent reads those of all pods of a node. So `require_readable` and `require_moderate`
look at it before anything else decodes it. The first is for every verb: a decoder that meets
thousands of nested lists overflows its thread's stack and takes the agent with it. The second is
for verbs that may be refused; a DEL and a GC release what an ADD of an older version made.
"""

import json
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from cni.spec.errors import CNIError, Code, invalid_config

MAX_BYTES = 1 << 20
MAX_VALUES = 10_000
MAX_DEPTH = 32
MAX_KEY = 256  # characters
MAX_TEXT = 16 << 10  # characters
MAX_ESCAPES = 1 << 16  # backslashes
MAX_KEYS = 64  # beside the plugin's own and the runtime's, at the top
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
RESULT_ADDRESSES = 256  # of a result: those of all plugins of a chain

MAX_PATH = 100  # characters, in an error
READABLE_DEPTH = 512
_PART = 16 << 10  # bytes
_BLOCK = 256
_STEP = [0] * 256
_STEP[ord("[")] = _STEP[ord("{")] = 1
_STEP[ord("]")] = _STEP[ord("}")] = -1
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def require_readable(raw: bytes) -> None:
    """Raise CNIError 6 for JSON that is nested so deeply that decoding it would be dangerous."""
    if raw.count(b"[") + raw.count(b"{") > READABLE_DEPTH:
        _depth_of(raw, READABLE_DEPTH, len(raw))


def require_moderate(raw: bytes) -> None:
    """Raise CNIError 7 for what is beyond the limits above, or for a key that stands twice.

    CNIError 6 if it is not JSON.
    """
    if len(raw) > MAX_BYTES:
        raise invalid_config(
            f"the configuration has {len(raw)} bytes, at most {MAX_BYTES} are allowed: shorten it"
        )
    if raw.count(b"\\") > MAX_ESCAPES:
        raise invalid_config(
            f"the configuration has more than {MAX_ESCAPES} backslashes: shorten its texts"
        )
    small = len(raw) <= MAX_TEXT  # so that no text in it is too long, nor are there many values
    depth = raw.count(b"[") + raw.count(b"{")
    if not small or depth > MAX_DEPTH:
        depth = _depth_of(raw, MAX_DEPTH, MAX_VALUES)
    try:
        text = raw.decode()
        if small and depth <= MAX_DEPTH:
            try:
                _STRICT.decode(text)
            except _Suspect:
                small = False
        if not small or depth > MAX_DEPTH:
            _refuse_first_wrong(_MARKING.decode(text))
    except (ValueError, RecursionError) as error:
        raise CNIError(Code.DECODING_FAILURE, f"error unmarshall network config: {error}") from None


def _depth_of(raw: bytes, allowed: int, most_values: int) -> int:
    """How deep JSON is nested; 0 stands for any depth up to `allowed`.

    CNIError 6 beyond READABLE_DEPTH, 7 beyond `most_values` values. Counts brackets and commas
    outside of strings, without decoding, a part at a time: a worker that looks at megabytes lets
    others run in between, and stops where it has seen enough.
    """
    depth = deepest = values = strings = 0
    for outside, inside in _parts_of(raw):
        strings += inside
        brackets = outside.translate(None, _NO_BRACKETS)
        for start in range(0, len(brackets), _BLOCK):
            block = brackets[start : start + _BLOCK]
            opening = block.count(b"[") + block.count(b"{")
            if depth + opening > allowed:
                deepest = max(deepest, *accumulate(map(_STEP.__getitem__, block), initial=depth))
                if deepest > READABLE_DEPTH:
                    text = "error unmarshall network config: nested too deeply"
                    raise CNIError(Code.DECODING_FAILURE, text)
            depth += 2 * opening - len(block)
        values += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        if values > most_values or strings > 2 * most_values + 1:  # each may have a key
            raise invalid_config(
                f"the configuration holds more than {most_values} JSON values: shorten its lists"
            )
    return deepest


def _parts_of(raw: bytes) -> Iterator[tuple[bytes, int]]:
    """JSON text without its strings, in parts; with each the number of strings that ended in it."""
    in_string = False
    rest = b""
    for start in range(0, len(raw), _PART):
        part = rest + raw[start : start + _PART]
        rest = b""
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # what it escapes is in the next part
            part, rest = part[:-1], b"\\"
        between_quotes = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b" ".join(between_quotes[in_string::2]), (len(between_quotes) - 1 + in_string) // 2
        in_string ^= len(between_quotes) % 2 == 0


class _Suspect(Exception):
    """An object has a key twice, or a key that is too long."""


class _Twice(dict[str, Any]):
    """An object that has `key` twice."""

    key = ""


def _plain(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = dict(pairs)
    if len(plain) != len(pairs) or (plain and max(map(len, plain)) > MAX_KEY):
        raise _Suspect
    return plain


def _marked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in pairs:
        if key in plain:
            plain = _Twice(plain)
            plain.key = key
            break
        plain[key] = value
    return plain


# json and not msgspec, which keeps the last of two equal keys in silence. Numbers stay text.
_STRICT = json.JSONDecoder(object_pairs_hook=_plain, parse_int=str, parse_float=str)
_MARKING = json.JSONDecoder(object_pairs_hook=_marked, parse_int=str, parse_float=str)

_Place = tuple["_Place | None", str | int]


def _refuse_first_wrong(document: object) -> None:
    """Raise CNIError 7 for the first thing that is too deep, too long or there twice."""
    waiting: list[tuple[object, _Place | None, int]] = [(document, None, 0)]
    while waiting:
        value, place, depth = waiting.pop()
        if isinstance(value, str):
            if len(value) > MAX_TEXT:
                raise invalid_config(
                    f'"{_path(place)}" has {len(value)} characters, at most {MAX_TEXT} are '
                    "allowed: shorten it"
                )
        elif isinstance(value, dict | list):
            if depth == MAX_DEPTH:
                raise invalid_config(
                    f'"{_path(place)}" is nested more than {MAX_DEPTH} deep: make it flatter'
                )
            if isinstance(value, dict):
                _refuse_keys(value, place)
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [(one, (place, key), depth + 1) for key, one in entries]


def _refuse_keys(value: dict[str, Any], place: _Place | None) -> None:
    if isinstance(value, _Twice):
        raise invalid_config(f'"{_path((place, value.key))}" stands twice: remove one of them')
    for key in value:
        if len(key) > MAX_KEY:
            raise invalid_config(
                f'"{_path((place, key))}": the key has {len(key)} characters, at most {MAX_KEY} '
                "are allowed: shorten it"
            )


def _path(place: _Place | None) -> str:
    """A place as in `ipam.ranges[0][1].subnet`; where that is long, its innermost steps."""
    path = ""
    while place is not None and len(path) < MAX_PATH:
        place, key = place
        path = (f"[{key}]" if isinstance(key, int) else f".{key[:MAX_PATH]}") + path
    beginning = "" if place is None and len(path) <= MAX_PATH else "..."
    return beginning + path[-MAX_PATH:].removeprefix(".")
