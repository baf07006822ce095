"""The output of commands, to a terminal and to a program."""

import sys

import pytest

from cli.output import Cell, Table, document, show

LONG = "a sentence that is longer than a line of this terminal"


@pytest.fixture(autouse=True)
def no_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of colours in the environment of a user or a CI."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def _on_a_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")


def test_a_row_is_a_line_for_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    show(Table(("A", "B"), [("x", ""), (Cell("y", "red"), "[b]" * 100)]), "", "a note")

    assert capsys.readouterr().out.splitlines() == [
        "A  B",
        "x  -",
        f"y  {'[b]' * 100}",
        "",
        "a note",
    ]


@pytest.mark.parametrize(("folded", "whole"), [(True, False), (False, True)])
def test_sentences_are_folded_on_a_terminal_and_other_rows_are_not(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folded: bool,
    whole: bool,
) -> None:
    _on_a_terminal(monkeypatch, 30)

    show(Table(("A", "B"), [("x", LONG)], folded=folded))

    assert (LONG in capsys.readouterr().out) is whole


def test_colours_are_for_terminals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Table(("A",), [(Cell("x", "red"),)])
    show(table)
    plain = capsys.readouterr().out
    _on_a_terminal(monkeypatch, 80)
    show(table)

    assert "\x1b[" not in plain
    assert "\x1b[31mx" in capsys.readouterr().out


def test_documents_are_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    document({"a": (1,)})

    assert capsys.readouterr().out == '{\n  "a": [\n    1\n  ]\n}\n'


def test_what_is_not_printable_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """Tenants name interfaces and networks; the table is on an administrator's terminal."""
    show("a\u202eb\nc", Table(("name",), [("\x1b]0;owned\x07",), (Cell("x\ny"),)]))
    told = capsys.readouterr().out
    assert told.splitlines() == ["a\\u202eb\\nc", "", "name", "\\x1b]0;owned\\x07", "x\\ny"]


def test_paragraphs_and_cells_have_several_lines(capsys: pytest.CaptureFixture[str]) -> None:
    show(["one", "two\n"], [], Table(("A", "B"), [(["x", "y\n"], Cell(("z",), "red")), ([], "w")]))

    assert capsys.readouterr().out.splitlines() == [
        "one",
        "two\\n",
        "",
        "A    B",
        "x    z",
        "y\\n",
        "-    w",
    ]
