"""Makes foreign text printable, and finds the valid key that is nearest to a wrong key."""

import re
from collections.abc import Collection

LONGEST = 4000  # characters of a line
LONGEST_WORD = 200
_LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD + 1},}}")


def printable(text: str) -> str:
    """Escape unprintable characters, so that foreign text cannot forge a line of a log."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def line(text: str) -> str:
    """The text as one printable line. A long word loses its end, and a long text loses its middle.

    The end of the text stays, because it has the remedy. A text with a non-ASCII character is cut
    to LONGEST / 6 characters, because JSON writes such a character in 6 bytes.
    """
    if len(text) <= LONGEST_WORD and text.isprintable():
        return text
    text = printable(without_middle(text, LONGEST))  # cut first: long texts take long
    text = _LONG_WORD.sub(lambda word: f"{word[0][:LONGEST_WORD]}...", text)
    return without_middle(text, LONGEST if text.isascii() else LONGEST // 6)


def without_middle(text: str, longest: int) -> str:
    """The text, without its middle if it is longer than `longest` characters."""
    if len(text) <= longest:
        return text
    end = longest // 4
    return f"{text[: longest - end]} ... {text[-end:]}"


def resembling(key: str, valid: Collection[str]) -> str | None:
    """The valid key that is most similar to `key`, or `None` if no valid key is similar."""
    import difflib  # imported here, because only wrong configurations need it

    folded = {_folded(name): name for name in sorted(valid)}
    if _folded(key) in folded:
        return folded[_folded(key)]
    nearest = difflib.get_close_matches(_folded(key), folded, n=1, cutoff=0.76)
    return folded[nearest[0]] if nearest else None


def _folded(key: str) -> str:
    return key.replace("_", "").replace("-", "").lower()
