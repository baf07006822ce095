"""The documents have what commands printed when tests ran them."""

from pathlib import Path

from tools.use_it import LOOKING, PAGE, WIDEST, commands, outputs, page, shown

CLI = Path(__file__).parent / "cli"


def test_page_has_readmes_commands_that_look_in_their_order() -> None:
    looking = [command for command in commands() if LOOKING in command]
    assert len(looking) == 3
    assert list(outputs(PAGE.read_text())) == looking
    assert all(outputs(PAGE.read_text()).values())


def test_every_shown_command_is_run_and_compared() -> None:
    tests = "".join(path.read_text() for path in CLI.glob("test_*.py"))
    assert shown()
    assert [each for each in shown() if f'"{each}"' not in tests] == []


def test_long_lines_are_cut_off() -> None:
    line = page("$ kubectl exec pod\n" + "x" * 200).splitlines()[-2]
    assert len(line) == WIDEST
    assert line.endswith("x…")
