"""Reads YAML or JSON files that an administrator writes, and checks each key."""

import os
import stat
import typing
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from base.text import resembling

MAX_BYTES = 256 << 10


class DocumentError(Exception):
    """A document cannot be used. The text is one line with the file, the key and the remedy."""


def read(path: Path) -> bytes:
    """Read the file. Raises OSError, and DocumentError if it is too large or not a regular file."""
    # O_NONBLOCK, because opening a FIFO would wait for a writer.
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise DocumentError(f"{path}: is not a regular file: replace or remove it")
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise DocumentError(f"{path}: is larger than {MAX_BYTES} bytes: shorten it")
    return content


def decode(content: bytes, name: str) -> object:
    """Decode a YAML or JSON document. Returns `None` if it is empty. Raises DocumentError."""
    if content.lstrip().startswith(b"{"):
        content = content.replace(b"\t", b" ")  # YAML refuses tabs between JSON's values
    import yaml  # imported here, because most nodes have no such file

    try:
        # Not CSafeLoader: deep nesting overflows its C stack and kills the process.
        loader = yaml.SafeLoader(content)
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_repeated(node, name, set())
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return msgspec.json.decode(content)  # to YAML the number 1e2 is a string
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = error.problem or error.context
        raise DocumentError(f"{name}: {position}neither YAML nor JSON: {problem}") from None
    except RecursionError:
        raise DocumentError(f"{name}: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        text = " ".join(str(error).split())
        raise DocumentError(f"{name}: neither YAML nor JSON: {text}") from None


def mapping(value: object, where: str) -> dict[str, Any]:
    """Require a mapping with string keys. `None` becomes {}. Raises DocumentError."""
    if value is None:  # an empty file, or a file with comments only
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
    """Convert each value of a mapping to the shape of its key. Returns the values by key.

    Args:
        shapes: the type of each key's value.
        where: the path to the mapping, for error texts, such as "config.yaml: agent".
        loose: ignore the case of keys, and ignore null, as Go's encoding/json does.

    Raises DocumentError for an unknown key, a repeated key, or a value that does not fit its shape.
    """
    spelt = {shape.lower(): shape for shape in shapes} if loose else {}
    values: dict[str, Any] = {}
    for written, inner in mapping(value, where).items():
        key = written if written in shapes else spelt.get(written.lower(), written)
        if key not in shapes:
            raise DocumentError(f"{where}.{written}: unknown key: {hint(written, shapes)}")
        if key in values:
            raise DocumentError(
                f"{where}.{written}: appears twice, in upper and lower case: keep one"
            )
        if not (loose and inner is None):
            values[key] = convert(inner, shapes[key], f"{where}.{written}")
    return values


def convert(value: object, shape: object, where: str) -> Any:  # noqa: ANN401 - the shape's
    """Convert the value to the type `shape`, without coercion. Raises DocumentError."""
    if shape is object:
        return value
    try:
        # Every comparison of NaN with a limit is false, so NaN would pass the checks.
        if value != value:
            raise msgspec.ValidationError("Expected a number")
        return msgspec.convert(value, type=shape)
    except ValueError as error:
        text, separator, position = str(error).rpartition(" - at `$")
        path = position.rstrip("`") if separator else ""
        wrong = _at(value, path) if path else value
        text = _explained(text if separator else str(error), shape)
        raise DocumentError(f"{where}{path}: {shown(wrong)}: {text}") from None


def hint(key: str, valid: Collection[str]) -> str:
    """A hint for an unknown key. It names the nearest valid key, or all valid keys."""
    nearest = resembling(key, valid)
    return f'did you mean "{nearest}"?' if nearest else f"valid keys are {', '.join(sorted(valid))}"


def shown(value: object) -> str:
    """A value as printable text for an error, cut after 60 characters."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _refuse_repeated(node: Any, name: str, seen: set[int]) -> None:  # noqa: ANN401 - lazily imported
    """Raise DocumentError for a repeated key. PyYAML would silently use the last value."""
    if id(node) in seen or isinstance(node.value, str):
        return
    seen.add(id(node))  # an alias may point to a node that contains the alias
    keys = set()
    for child in node.value:
        if not isinstance(child, tuple):
            _refuse_repeated(child, name, seen)
            continue
        key, value = child
        if isinstance(key.value, str) and key.value in keys:
            line, text = key.start_mark.line + 1, key.value or '""'
            raise DocumentError(f"{name}: line {line}: {text}: appears twice: keep one")
        keys.add(str(key.value))
        _refuse_repeated(value, name, seen)


def _explained(text: str, shape: object) -> str:
    """Return a clearer text for an error text of msgspec, such as "Expected `int`"."""
    choices = _choices(shape)
    if choices and text.startswith("Invalid enum value"):
        return f"expected one of {', '.join(choices)}"
    text = text.replace("`", "")
    text = text[:1].lower() + text[1:]
    # YAML reads 1017 and 0000:05:00.0 as numbers.
    is_list = typing.get_origin(shape) in (list, tuple)
    if is_list and text in ("expected str, got int", "expected str, got float"):
        text += ": put it in quotes"
    if text.startswith("expected array"):
        text = text.replace("expected array", "expected a list")
    return text


def _choices(shape: object) -> tuple[str, ...]:
    if typing.get_origin(shape) is Literal:
        return typing.get_args(shape)
    inner = (_choices(argument) for argument in typing.get_args(shape))
    return next((choices for choices in inner if choices), ())


def _at(value: object, path: str) -> object:
    """The item of `value` at a path in msgspec's error, such as "[0]".

    Other paths return the whole value.
    """
    index = path[1:-1]
    if isinstance(value, list) and index.isdecimal() and int(index) < len(value):
        return value[int(index)]
    return value
