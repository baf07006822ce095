"""Parses command lines. An error names the nearest valid word."""

from argparse import Action, ArgumentError, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from base.text import resembling


class Parser(ArgumentParser):
    def parse_known_args(  # type: ignore[override] # typeshed has overloads for namespaces
        self, args: Iterable[str] | None = None, namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        """Report an unknown word with the usage of this command, not of `podfabric`."""
        known, unknown = super().parse_known_args(list(args or ()), namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown[0])}")
        return known, []

    def _check_value(self, action: Action, value: Any) -> None:  # noqa: ANN401 - as argparse's
        try:
            super()._check_value(action, value)
        except ArgumentError as error:
            choices = [str(choice) for choice in action.choices or ()]
            raise ArgumentError(action, f"{error.message}{meant(str(value), choices)}") from None

    def _hint(self, word: str) -> str:
        flag = word.partition("=")[0]
        for action in self._actions:
            if action.option_strings and flag.removeprefix("--") in (action.choices or ()):
                return f': did you mean "{action.option_strings[0]} {flag.removeprefix("--")}"?'
        return meant(flag, self._option_string_actions) if flag.startswith("-") else ""


def meant(word: str, valid: Collection[str]) -> str:
    """The end of an error text, with the nearest valid word. Returns "" if no word is near."""
    nearest = resembling(word, valid)
    return f': did you mean "{nearest}"?' if nearest else ""


def seconds(text: str) -> float:
    if not (text.isascii() and text.isdecimal()) or len(text) > 5:
        raise ArgumentTypeError(f"{text!r}: expected whole seconds, 0 to 99999")
    return float(text)


def file(text: str) -> Path:
    """Refuse "", because a variable in the caller's script may be unset."""
    if not text:
        raise ArgumentTypeError("the path is empty: write a path, or remove the option")
    return Path(text)


def namespace(text: str) -> str:
    if not text or "/" in text:
        raise ArgumentTypeError(f"{text!r}: expected the name of a namespace")
    return text


def pod(text: str) -> str:
    if text.count("/") > 1 or not all(text.split("/")):
        raise ArgumentTypeError(f"{text!r}: expected a pod's name, or namespace/name")
    return text
