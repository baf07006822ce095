"""Reads what an administrator writes, YAML or JSON, and checks it key by key.

Every mistake is a DocumentError: one line that names the file, the path to the key
("pools[1].slots"), what was found and what would be right.
"""

import os
import stat
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from base.text import resembling

MAX_BYTES = 256 << 10


class DocumentError(Exception):
    """A document that cannot be used. The text names file and key and says what to do."""


def read(path: Path) -> bytes:
    """The file's content. DocumentError if it is no file or too large; else OSError."""
    # Not blocking, for what is no file (a FIFO) would be waited for.
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise DocumentError(f"{path}: is no file: put one there, or nothing")
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise DocumentError(f"{path}: is larger than {MAX_BYTES} bytes")
    return content


def decode(content: bytes, name: str) -> object:
    """The one value in it, None if there is none; `name` is for the errors (DocumentError)."""
    if content.lstrip().startswith(b"{"):
        # PyYAML refuses JSON that is indented by tabs and takes 1e2 for a string.
        try:
            value = msgspec.json.decode(content)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass  # it may be YAML's own form with braces
        else:
            _refuse_repeated_in_json(content, name)
            return value
    import yaml  # not earlier: only a node that has a file needs it

    try:
        # Not CSafeLoader: deep nesting overflows its C stack, and the process dies.
        loader = yaml.SafeLoader(content)
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_repeated(node, name, set())
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = error.problem or error.context
        raise DocumentError(f"{name}: {place}neither YAML nor JSON: {problem}") from None
    except RecursionError:
        raise DocumentError(f"{name}: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        text = " ".join(str(error).split())
        raise DocumentError(f"{name}: neither YAML nor JSON: {text}") from None


def mapping(value: object, where: str) -> dict[str, Any]:
    """The value if it is a mapping with strings for keys, {} for None; else DocumentError."""
    if value is None:  # nothing but comments
        return {}
    if not isinstance(value, dict):
        raise DocumentError(f"{where}: expected keys with values, got {shown(value)}")
    for key in value:
        if not isinstance(key, str):
            raise DocumentError(f"{where}: {shown(key)}: unknown key")
    return value


def fields(
    value: object, shapes: Mapping[str, object], where: str, *, loose: bool = False
) -> dict[str, Any]:
    """The keys of a mapping, each converted to its shape, an annotation that msgspec knows.

    `where` is the mapping's own place: "config.yaml: agent". An unknown key or a value of
    another shape is a DocumentError. `loose` is how Go's encoding/json reads: the letters' case
    of a key does not matter, and null is as good as absent.
    """
    spelt = {shape.lower(): shape for shape in shapes} if loose else {}
    values: dict[str, Any] = {}
    for given, inner in mapping(value, where).items():
        key = given if given in shapes else spelt.get(given.lower(), given)
        if key not in shapes:
            raise DocumentError(f"{where}.{given}: unknown key: {hint(given, shapes)}")
        if key in values:
            raise DocumentError(f"{where}.{given}: is there twice: keep one")
        if not (loose and inner is None):
            values[key] = convert(inner, shapes[key], f"{where}.{given}")
    return values


def convert(value: object, shape: object, where: str) -> Any:  # noqa: ANN401 - the shape's
    """The value as the shape, without coercion, or DocumentError."""
    if shape is object:
        return value
    try:
        # NaN is neither below nor above any limit.
        if value != value:
            raise msgspec.ValidationError("Expected a number")
        return msgspec.convert(value, type=shape)
    except ValueError as error:
        text, separator, place = str(error).rpartition(" - at `$")
        path = place.rstrip("`") if separator else ""
        found = _at(value, path) if path else value
        text = _explained(text if separator else str(error), shape)
        raise DocumentError(f"{where}{path}: {shown(found)}: {text}") from None


def hint(key: str, known: Collection[str]) -> str:
    """What to write in place of an unknown key."""
    nearest = resembling(key, known)
    return f'did you mean "{nearest}"?' if nearest else f"valid keys are {', '.join(sorted(known))}"


def shown(value: object) -> str:
    """A value that somebody wrote, fit for one line of an error."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _refuse_repeated(node: Any, name: str, seen: set[int]) -> None:  # noqa: ANN401 - lazily imported
    """PyYAML takes the last of two equal keys, and the first would be lost without a word."""
    if id(node) in seen or isinstance(node.value, str):
        return
    seen.add(id(node))  # an alias may lead back to where it stands
    keys: set[str] = set()
    for child in node.value:
        if not isinstance(child, tuple):
            _refuse_repeated(child, name, seen)
            continue
        key, value = child
        text = key.value if isinstance(key.value, str) else ""
        if text and text in keys:
            line = key.start_mark.line + 1
            raise DocumentError(f"{name}: line {line}: {text}: is there twice: keep one")
        keys.add(text)
        _refuse_repeated(value, name, seen)


class _Pairs(list[tuple[str, object]]):
    """The keys of a JSON object with their values, as often as they are there."""


def _refuse_repeated_in_json(content: bytes, name: str) -> None:
    """As of YAML: msgspec takes the last one, too, and does not tell."""
    import json

    try:
        # Numbers as they are written: some cannot be read, and they do not matter here.
        pairs = json.loads(
            content, object_pairs_hook=_Pairs, parse_int=str, parse_float=str, strict=False
        )
        place = _repeated(pairs, "")
    except RecursionError:
        raise DocumentError(f"{name}: nested too deeply") from None
    if place:
        raise DocumentError(f"{name}: {place}: is there twice: keep one")


def _repeated(value: object, where: str) -> str:
    """The path to the first key that its object has twice, "" if there is none."""
    children: list[tuple[str, object]] = []
    if isinstance(value, _Pairs):
        keys = set()
        for key, child in value:
            path = f"{where}.{key}" if where else key or '""'
            if key in keys:
                return path
            keys.add(key)
            children.append((path, child))
    elif isinstance(value, list):
        children = [(f"{where}[{index}]", child) for index, child in enumerate(value)]
    return next((found for path, child in children if (found := _repeated(child, path))), "")


def _explained(text: str, shape: object) -> str:
    """msgspec says "Invalid enum value 'loud'" and "Expected `int` <= 256"."""
    choices = _choices(shape)
    if choices and text.startswith("Invalid enum value"):
        return f"expected one of {', '.join(choices)}"
    text = text.replace("`", "")
    text = text[:1].lower() + text[1:]
    # YAML reads 1017 and 0000:05:00.0 as numbers.
    if text in ("expected str, got int", "expected str, got float") and _is_list(shape):
        text += ": put it in quotes"
    if text.startswith("expected array"):
        text = text.replace("expected array", "expected a list")
    return text


def _choices(shape: object) -> tuple[str, ...]:
    if typing.get_origin(shape) is Literal:
        return typing.get_args(shape)
    return next((found for one in typing.get_args(shape) if (found := _choices(one))), ())


def _is_list(shape: object) -> bool:
    return typing.get_origin(shape) in (list, tuple)


def _at(value: object, path: str) -> object:
    """What stands at msgspec's path, such as "[0]"; the whole value where that is more."""
    index = path[1:-1]
    if isinstance(value, list) and index.isdecimal() and int(index) < len(value):
        return value[int(index)]
    return value
