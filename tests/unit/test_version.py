"""The project, the chart, the changelog and a release's tag have one version."""

import re
import subprocess
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_chart_has_the_version() -> None:
    chart = yaml.safe_load((ROOT / "deploy/chart/Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)


def test_changelog_begins_with_the_version() -> None:
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None and first[1] == VERSION


def test_a_release_tag_of_this_commit_is_the_version() -> None:
    listed = subprocess.run(
        ["git", "tag", "--points-at", "HEAD", "v*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert listed.stdout.split() in ([], [f"v{VERSION}"])
