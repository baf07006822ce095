"""The requirement lock files: every package has hashes; runtime and development are separate."""

import re
import tomllib
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
REQUIREMENT = re.compile(r"([a-z0-9-]+)==(\S+)")


def packages(name: str) -> dict[str, int]:
    """How many hashes each package of a lock file has."""
    counted: dict[str, int] = {}
    for line in (CHECKOUT / name).read_text().splitlines():
        requirement = REQUIREMENT.match(line)
        if requirement is not None:
            package = requirement[1]
            counted[package] = 0
        elif "--hash=sha256:" in line:
            counted[package] += 1
    return counted


def declared(dependencies: list[str]) -> set[str]:
    names = (re.split(r"[<>=!~;\[ ]", text, maxsplit=1)[0] for text in dependencies)
    return {re.sub(r"[-_.]+", "-", name).lower() for name in names}


def test_every_package_has_hashes() -> None:
    for name in ("requirements.lock", "requirements-dev.lock"):
        assert packages(name)
        assert [package for package, hashes in packages(name).items() if not hashes] == []


def test_what_runs_is_apart_from_what_the_checks_need() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    runtime, development = packages("requirements.lock"), packages("requirements-dev.lock")
    assert declared(project["dependencies"]) <= runtime.keys()
    assert declared(project["optional-dependencies"]["dev"]) <= development.keys()
    assert runtime.keys() & development.keys() == set()
