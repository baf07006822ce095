"""docs/operate/troubleshooting.md quotes error texts that the product has."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/operate/troubleshooting.md").read_text()
QUOTES = re.findall(
    r"^```\n((?:\[podfabric \d+\]|\.\.\.) .*?)\n```$", PAGE, re.MULTILINE | re.DOTALL
)
SHORTEST = 8  # characters of a fragment that says something


def _literals() -> str:
    """All texts of the product's Python and C, one a line."""
    files = subprocess.run(
        ["git", "ls-files", "agent", "cli", "cni", "deviceplugin", "host", "ipam", "policy"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    texts = []
    for file in files:
        source = (ROOT / file).read_text() if file.endswith((".py", ".c")) else ""
        if file.endswith(".c"):
            texts += re.findall(r'"((?:[^"\\]|\\.)*)"', source)
        elif source:
            nodes = ast.walk(ast.parse(source))
            constants = (node.value for node in nodes if isinstance(node, ast.Constant))
            texts += [value for value in constants if isinstance(value, str)]
    return "\n".join(texts)


LITERALS = _literals()


@pytest.mark.parametrize("quote", QUOTES)
def test_quoted_text_is_the_products(quote: str) -> None:
    words = re.sub(r"\s+", " ", re.sub(r"^\[podfabric \d+\] ", "", quote))
    fragments = [part.strip(' "()') for part in re.split(r"\.\.\.+|\d+|: |\"", words)]
    said = [part for part in fragments if len(part) >= SHORTEST]
    assert said
    assert [part for part in said if part not in LITERALS] == []


def test_page_has_the_usual_cases() -> None:
    assert len(QUOTES) >= 12
