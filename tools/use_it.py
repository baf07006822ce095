"""Writes docs/use-it.md: README's "Use it", and what its commands printed on the test cluster.

`python -m tools.use_it`, after `make test-cluster` or its tests/cluster/test_readme.py.
"""

import re
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
PRINTED = CHECKOUT / "build/vm/use-it.txt"
PAGE = CHECKOUT / "docs/use-it.md"
README = CHECKOUT / "README.md"
WIDEST = 160  # characters
SECTION = re.compile(r"^On a cluster with Multus:$.*?^\[This is what they print", re.M | re.S)
BLOCK = re.compile(r"^```\n(.*?)^```$", re.M | re.S)
HEAD = """# What README's commands print

`make test-cluster` runs the commands of [Use it](../README.md#use-it), as they are written, on a
real Kubernetes with containerd and Multus. Its node is a virtual machine with the software HCAs
`ibloop0` and `ibloop1`. `python -m tools.use_it` writes here what they printed.
"""


def commands() -> list[str]:
    """README's commands for the cluster, in their order: all but the one that makes the image."""
    section = SECTION.search(README.read_text())
    assert section is not None
    lines = [line for block in BLOCK.findall(section[0]) for line in block.splitlines()]
    return [line for line in lines if not line.startswith("make ")]


def page(printed: str) -> str:
    """The page in Markdown, of what the test wrote down."""
    lines = [_shortened(line.rstrip()) for line in printed.strip().splitlines()]
    return "\n".join([HEAD, "```", *lines, "```", ""])


def main() -> int:
    """Write the page."""
    if not PRINTED.exists():
        print(f"{PRINTED} does not exist: run `make test-cluster` first", file=sys.stderr)
        return 1
    PAGE.write_text(page(PRINTED.read_text()))
    return 0


def _shortened(line: str) -> str:
    return line if len(line) <= WIDEST else f"{line[: WIDEST - 1]}…"


if __name__ == "__main__":
    sys.exit(main())
