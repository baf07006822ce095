"""The documents have what commands printed when tests ran them."""

import re
from pathlib import Path

from tests.runtime import CHECKOUT
from tools.use_it import LOOKING, RECORD, commands, outputs, record, shown, without_chance

CLI = Path(__file__).parent / "cli"
SHOWN = re.compile(r"^```\n((?:Pod |HCA  |\d+: net1).*?)^```$", re.M | re.S)


def test_record_has_readmes_commands_that_look_in_their_order() -> None:
    looking = [command for command in commands() if LOOKING in command]
    assert len(looking) == 3
    assert list(outputs(RECORD.read_text())) == looking
    assert all(outputs(RECORD.read_text()).values())


def test_pages_show_lines_of_the_record() -> None:
    known = without_chance(RECORD.read_text()).splitlines()
    pages = [CHECKOUT / "docs/use" / name for name in ("first-pod.md", "devices.md")]
    blocks = [
        without_chance(block).splitlines()
        for page in pages
        for block in SHOWN.findall(page.read_text())
    ]
    assert len(blocks) == 3
    assert [line for block in blocks for line in block if line not in known] == []


def test_record_has_the_output_of_commands_that_look() -> None:
    printed = "$ helm install\nNAME\n\n$ kubectl exec pod\nhere  \n\n"
    assert record(printed) == "$ kubectl exec pod\nhere\n"


def test_every_shown_command_is_run_and_compared() -> None:
    tests = "".join(path.read_text() for path in CLI.glob("test_*.py"))
    assert shown()
    assert [each for each in shown() if f'"{each}"' not in tests] == []
