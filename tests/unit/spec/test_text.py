"""Text of a tenant in error texts."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from base import text
from cni.spec.dispatch import error_document
from cni.spec.errors import CNIError

TAIL = " : remove it"


@pytest.mark.parametrize(
    "character", ["\n", "\r", "\x1b", "\0", "\x9b", "\u202e", "\u2028", "\udcff"]
)
def test_error_is_one_printable_line(character: str) -> None:
    error = CNIError(7, f'"x{character}y"', f"{character}z")
    assert error.message.isprintable()
    assert error.details.isprintable()
    assert str(error) == error.message


def test_ordinary_error_stays_as_it_is() -> None:
    for message in ("missing network name", 'parent "ib0" é …', "x" * 200, "word " * 500):
        assert CNIError(7, message).message == message


def test_long_word_is_cut_and_what_follows_stays() -> None:
    assert text.line("a" * 300 + TAIL) == "a" * 200 + "..." + TAIL


def test_long_text_loses_its_middle() -> None:
    line = text.line("first " + "word " * 10_000 + TAIL)
    assert line.startswith("first word")
    assert line.endswith(TAIL)
    assert len(line) < 4100


@given(st.text(max_size=300), st.integers(1, 100))
def test_error_document_stays_near_4_kib_with_any_quotation(piece: str, times: int) -> None:
    document = error_document(CNIError(7, piece * times + TAIL))
    assert len(document) < 9000
    message = json.loads(document)["msg"]
    assert message.isprintable()
    assert message.endswith(TAIL)


def test_error_about_a_mebibyte_is_made_at_once() -> None:
    for character in ("x", "\x1b", " ", "é", "\udcff"):
        assert len(text.line(character * (1 << 20))) <= text.LONGEST + 10
