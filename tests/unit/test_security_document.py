"""docs/operate/security.md: each guarantee names tests, and they exist."""

import ast
import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
DOCUMENT = (CHECKOUT / "docs/operate/security.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", DOCUMENT)))
GUARANTEES = DOCUMENT.partition("## Guarantees against a tenant")[2].partition(
    "## What podfabric does not"
)[0]


@pytest.mark.parametrize("named", NAMED)
def test_test_that_is_named_exists(named: str) -> None:
    path, _, function = named.partition("::")
    module = ast.parse((CHECKOUT / path).read_text())
    tests = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
    assert function in tests if function else any(name.startswith("test_") for name in tests)


def test_each_guarantee_names_a_test() -> None:
    guarantees = re.split(r"^- ", GUARANTEES, flags=re.MULTILINE)[1:]
    assert guarantees
    assert [text for text in guarantees if "`tests/" not in text] == []


def test_each_attack_stands_for_a_guarantee() -> None:
    attacks = {f"tests/attacks/{path.name}" for path in CHECKOUT.glob("tests/attacks/test_*.py")}
    assert attacks - {named.partition("::")[0] for named in NAMED} == set()
