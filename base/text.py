"""Texts that others wrote, made fit for a line that a person reads."""

import re
from collections.abc import Collection

LONGEST = 4000  # characters of a line
LONGEST_WORD = 200
_LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD + 1},}}")


def printable(text: str) -> str:
    """Without line ends, escape sequences, or letters that turn the direction of writing.

    What a pod or a client wrote can then forge no line of a log, and no look of one.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def line(text: str) -> str:
    """One printable line, with a long word cut at its end and a long text in its middle.

    The end of an error says what to do, so it stays. JSON makes 6 bytes of a character beyond
    ASCII: a text that has any may be a sixth as long.
    """
    if len(text) <= LONGEST_WORD and text.isprintable():
        return text
    text = printable(without_middle(text, LONGEST))  # first cut, so that all of this is quick
    text = _LONG_WORD.sub(lambda word: f"{word[0][:LONGEST_WORD]}...", text)
    return without_middle(text, LONGEST if text.isascii() else LONGEST // 6)


def without_middle(text: str, longest: int) -> str:
    """The text, or its beginning and its end where it has more than `longest` characters."""
    if len(text) <= longest:
        return text
    end = longest // 4
    return f"{text[: longest - end]} ... {text[-end:]}"


def resembling(key: str, known: Collection[str]) -> str:
    """The known key that `key` most likely was meant to be, or ""."""
    import difflib  # only a configuration that is wrong pays for it

    folded = {_folded(name): name for name in sorted(known)}
    if _folded(key) in folded:
        return folded[_folded(key)]
    nearest = difflib.get_close_matches(_folded(key), folded, n=1, cutoff=0.76)
    return folded[nearest[0]] if nearest else ""


def _folded(key: str) -> str:
    return key.replace("_", "").replace("-", "").lower()
