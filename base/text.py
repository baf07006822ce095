"""Makes a printable line of foreign text, and finds the valid key nearest to a wrong one."""

import re
from collections.abc import Collection

LONGEST = 4000  # characters of a line
LONGEST_WORD = 200
_LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD + 1},}}")


def printable(text: str) -> str:
    """The text with line ends, escape sequences and direction marks escaped.

    Text from a pod or client can then not forge a line of a log.
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def line(text: str) -> str:
    """The text as one printable line: long words cut at the end, a long text in the middle.

    The end stays because it has the remedy. JSON writes a non-ASCII character in 6 bytes, so a text
    with such characters may have a sixth of the length.
    """
    if len(text) <= LONGEST_WORD and text.isprintable():
        return text
    text = printable(without_middle(text, LONGEST))  # cut first: the rest is slow on long texts
    text = _LONG_WORD.sub(lambda word: f"{word[0][:LONGEST_WORD]}...", text)
    return without_middle(text, LONGEST if text.isascii() else LONGEST // 6)


def without_middle(text: str, longest: int) -> str:
    """The text.

    If it is longer than `longest` characters, only its beginning and its end are kept.
    """
    if len(text) <= longest:
        return text
    end = longest // 4
    return f"{text[: longest - end]} ... {text[-end:]}"


def resembling(key: str, valid: Collection[str]) -> str | None:
    """The valid key that `key` was most likely meant to be; `None` if none is close."""
    import difflib  # here, because only wrong configurations need it

    folded = {_folded(name): name for name in sorted(valid)}
    if _folded(key) in folded:
        return folded[_folded(key)]
    nearest = difflib.get_close_matches(_folded(key), folded, n=1, cutoff=0.76)
    return folded[nearest[0]] if nearest else None


def _folded(key: str) -> str:
    return key.replace("_", "").replace("-", "").lower()
