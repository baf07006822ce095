"""Writes the output of commands, as tests ran them, into the documents.

`python -m tools.use_it` writes each block of a document that begins with `# podfabric`, after the
tests that run these commands on simulated servers. The folder tests/unit/cli/printed has the
outputs that no document shows. tests/cluster/printed.txt has the outputs of README's commands,
after `make test-cluster` or its tests/cluster/test_readme.py. Documents show parts of this file.
"""

import re
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
PRINTED = CHECKOUT / "build/vm/use-it.txt"
RECORD = CHECKOUT / "tests/cluster/printed.txt"
README = CHECKOUT / "README.md"
SECTION = re.compile(r"^On a cluster with Multus:$.*?^\[Your first pod\]", re.M | re.S)
PAGES = (README, *sorted((CHECKOUT / "docs").rglob("*.md")))
KEPT = CHECKOUT / "tests/unit/cli/printed"
RUN = re.compile(r"^```\n# (podfabric [^\n]*)\n(.*?)^```$", re.M | re.S)
CHANCE = {
    re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"): "2026-11-21T20:10:27Z",
    re.compile(r"\([0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\)"): "(the UID)",
    re.compile(r"-\d+-[0-9a-f]{8}\.sock"): "-4711-5a0c1e2f.sock",
}
"""Values that differ in each run, and their replacements: times, UIDs of pods, sockets."""

BLOCK = re.compile(r"^```\n(.*?)^```$", re.M | re.S)
LOOKING = " exec "  # is in the commands whose output is recorded


def commands() -> list[str]:
    """README's commands for the cluster, in order, without the one that makes the image."""
    section = SECTION.search(README.read_text())
    assert section is not None
    lines = [line for block in BLOCK.findall(section[0]) for line in block.splitlines()]
    return [line for line in lines if not line.startswith("make ")]


def record(printed: str) -> str:
    """The outputs that are kept, of all that a run of README's commands printed."""
    looked = [
        f"$ {command}\n{output.rstrip()}\n"
        for command, output in outputs(printed).items()
        if LOOKING in command
    ]
    return "\n".join(looked)


def outputs(text: str) -> dict[str, str]:
    """The output of each command in a record."""
    parts = re.split(r"^\$ (.*)\n", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def shown() -> dict[str, str]:
    """The output of each `podfabric` command in the documents."""
    return {run[1]: run[2] for path in PAGES for run in RUN.finditer(path.read_text())}


def printed_at(command: str) -> Path:
    """The file in which the test leaves the command's output."""
    return CHECKOUT / "build/pages" / f"{re.sub('[^a-z0-9]+', '-', command)}.txt"


def kept_at(command: str) -> Path:
    """The file with the expected output of a command that no document shows."""
    return KEPT / printed_at(command).name


def with_printed(text: str) -> str:
    """The document with the output that the commands printed in the last test run."""
    return RUN.sub(lambda run: f"```\n# {run[1]}\n{_printed(run)}```", text)


def without_chance(printed: str) -> str:
    """The text with fixed values for times, UIDs and sockets."""
    for pattern, instead in CHANCE.items():
        printed = pattern.sub(instead, printed)
    return printed


def main() -> int:
    """Write the pages for which output was recorded."""
    if not PRINTED.exists() and not printed_at("").parent.exists():
        print("there is nothing to write: run tests/unit/cli or `make test-cluster` first")
        return 1
    if PRINTED.exists():
        RECORD.write_text(record(PRINTED.read_text()))
    for path in PAGES:
        path.write_text(with_printed(path.read_text()))
    for path in KEPT.iterdir():
        printed = printed_at("").parent / path.name
        if printed.exists():
            path.write_text(printed.read_text())
    return 0


def _printed(run: re.Match[str]) -> str:
    path = printed_at(run[1])
    return path.read_text() if path.exists() else run[2]


if __name__ == "__main__":
    sys.exit(main())
