"""CONTRIBUTING lists every folder, no two classes have one name, and links lead to something."""

import ast
import re
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("agent", "base", "cli", "cni", "deviceplugin", "gpu", "host", "ipam", "kube", "policy")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
_ROW = re.compile(r"^\| `([\w/]+)/` \|", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#\s]+?)(?:#([^)]*))?\)")


def _tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).exists()]


def _modules() -> dict[str, set[str]]:
    """The modules of each package of the product; generated ones are left out."""
    modules: dict[str, set[str]] = defaultdict(set)
    for path in _tracked(*(f"{package}/*.py" for package in PRODUCT)):
        if not path.stem.endswith(("_pb2", "_pb2_grpc")):
            modules[str(path.parent)].add(path.stem)
    return {folder: names - {"__init__"} for folder, names in modules.items()}


def test_contributing_says_what_changes_in_every_folder() -> None:
    listed = set(_ROW.findall(CONTRIBUTING))
    assert listed >= {folder for folder, names in _modules().items() if names} - {"cli/node", "cni"}
    assert all((ROOT / folder).is_dir() for folder in listed)


def test_contributing_lists_every_folder_of_tests() -> None:
    folders = {path.parts[1] for path in _tracked("tests/*/*.py")}
    listed = set(re.findall(r"^\| `tests/(\w+)/`", CONTRIBUTING, re.MULTILINE))
    assert listed == folders


def test_no_two_classes_of_the_product_have_one_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in _tracked(*(f"{package}/*.py" for package in PRODUCT)):
        if path.stem.endswith(("_pb2", "_pb2_grpc")):
            continue
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(str(path))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


@pytest.mark.parametrize("page", _tracked("*.md"), ids=str)
def test_links_of_a_page_lead_to_files_and_headings(page: Path) -> None:
    for target, heading in _LINK.findall((ROOT / page).read_text()):
        if "://" in target:
            continue
        path = (ROOT / page).parent / target
        assert path.exists(), f"{page} links to {target}"
        if heading and path.suffix == ".md":
            titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in slugs, f"{page} links to #{heading} of {target}"
