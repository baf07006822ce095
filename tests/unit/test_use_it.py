"""docs/use-it.md has what README's commands printed."""

from tools.use_it import PAGE, WIDEST, commands, page


def test_page_has_readmes_commands_in_their_order() -> None:
    shown = [line for line in PAGE.read_text().splitlines() if line.startswith("$ ")]
    assert shown == [f"$ {command}" for command in commands()]


def test_long_lines_are_cut_off() -> None:
    line = page("$ command\n" + "x" * 200).splitlines()[-2]
    assert len(line) == WIDEST
    assert line.endswith("x…")
