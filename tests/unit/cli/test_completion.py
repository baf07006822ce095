"""Examples in the help, and completion by a shell."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cli.commands import COMMANDS, EXAMPLES, run


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("podfabric st", {"status"}),
        ("podfabric status --cl", {"--cluster"}),
        ("podfabric ipam re", {"release", "reclaim"}),
    ],
)
def test_a_shell_completes_commands_and_options(
    line: str, expected: set[str], tmp_path: Path
) -> None:
    answer = tmp_path / "answer"
    environ = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    subprocess.run(
        [sys.executable, "-c", "from cli.main import main; main()", *shlex.split(line)[1:]],
        env=environ,
        check=False,
        capture_output=True,
    )
    assert {word.strip() for word in answer.read_text().split("\v")} == expected


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_help_has_an_example_with_valid_words(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run([name, "--help"])
    assert EXAMPLES[name] in " ".join(capsys.readouterr().out.split())
    assert shlex.split(EXAMPLES[name])[:2] == ["podfabric", name]
    assert name in COMMANDS
