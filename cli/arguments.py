"""Argument types for argparse, with errors that say what was expected."""

from argparse import ArgumentTypeError
from pathlib import Path


def count(text: str) -> int:
    """A positive number."""
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or int(text) < 1:
        raise ArgumentTypeError(f"{text!r}: expected a positive number")
    return int(text)


def seconds(text: str) -> float:
    """A time; 0 is allowed."""
    if not (text.isascii() and text.isdecimal()) or len(text) > 5:
        raise ArgumentTypeError(f"{text!r}: expected whole seconds, 0 to 99999")
    return float(text)


def file_name(text: str) -> str:
    """A file's name; not the empty text of a script's unset variable."""
    if not text:
        raise ArgumentTypeError("it is empty: name a file, or leave the option out")
    return text


def file(text: str) -> Path:
    """A file's path."""
    return Path(file_name(text))


def namespace(text: str) -> str:
    """A pod's namespace."""
    if not text or "/" in text:
        raise ArgumentTypeError(f"{text!r}: expected the name of a namespace")
    return text


def pod(text: str) -> str:
    """A pod: its name, or namespace/name."""
    if text.count("/") > 1 or not all(text.split("/")):
        raise ArgumentTypeError(f"{text!r}: expected a pod's name, or namespace/name")
    return text
