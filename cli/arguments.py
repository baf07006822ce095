"""Types of arguments, for argparse: a text that is none of them is said to be wrong, and how."""

from argparse import ArgumentTypeError
from pathlib import Path


def count(text: str) -> int:
    """A number from 1 on."""
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or int(text) < 1:
        raise ArgumentTypeError(f"{text!r}: expected a number from 1 on")
    return int(text)


def file_name(text: str) -> str:
    """What may be a file's name: anything but nothing, as a script's unset variable leaves it."""
    if not text:
        raise ArgumentTypeError("it is empty: name one, or leave the option out")
    return text


def file(text: str) -> Path:
    """The same as a path."""
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
