"""The descriptions of packages, names and sizes of the product's code, and the targets of links."""

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = (
    "agent",
    "base",
    "cli",
    "cni",
    "deviceplugin",
    "gpu",
    "host",
    "ipam",
    "kube",
    "node",
    "policy",
)
MOST_MODULES = 16  # of a folder
MOST_LINES = 400  # of a module
MOST_FUNCTION_LINES = 50
MOST_ARGUMENTS = 8  # of a constructor
EVERYWHERE = {"errors", "options", "plugin"}  # names of modules that several folders may have
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


def _product() -> list[Path]:
    """The modules of the product; generated ones are left out."""
    paths = _tracked(*(f"{package}/*.py" for package in PRODUCT))
    return [path for path in paths if not path.stem.endswith(("_pb2", "_pb2_grpc"))]


def _modules() -> dict[str, set[str]]:
    """The modules of each folder of the product."""
    modules: dict[str, set[str]] = defaultdict(set)
    for path in _product():
        modules[str(path.parent)].add(path.stem)
    return {folder: names - {"__init__"} for folder, names in modules.items()}


def _functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function of the product, and where it is."""
    for path in _product():
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path}:{node.lineno} {node.name}", node


def test_the_docstring_of_every_package_says_what_is_in_it() -> None:
    packages = {
        folder: ast.parse((ROOT / folder / "__init__.py").read_text()) for folder in _modules()
    }
    words = {folder: (ast.get_docstring(tree) or "").split() for folder, tree in packages.items()}
    assert [folder for folder, said in words.items() if len(said) < 6] == []


def test_the_page_of_tests_lists_every_folder_of_tests() -> None:
    folders = {path.parts[1] for path in _tracked("tests/*/*.py")}
    page = (ROOT / "docs/developers/tests.md").read_text()
    assert set(re.findall(r"^- `tests/(\w+)/`", page, re.MULTILINE)) == folders


def test_a_folder_has_few_modules() -> None:
    counts = {folder: len(names) for folder, names in _modules().items()}
    assert {folder: n for folder, n in counts.items() if n > MOST_MODULES} == {}


def test_no_two_modules_of_the_product_have_one_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for folder, names in _modules().items():
        for name in names - EVERYWHERE:
            places[name].append(folder)
    assert {name: folders for name, folders in places.items() if len(folders) > 1} == {}


def test_no_two_classes_of_the_product_have_one_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in _product():
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(str(path))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_a_module_is_short() -> None:
    lines = {str(path): len((ROOT / path).read_text().splitlines()) for path in _product()}
    assert {path: n for path, n in lines.items() if n > MOST_LINES} == {}


def test_a_function_is_short() -> None:
    lines = {at: (node.end_lineno or 0) - node.lineno + 1 for at, node in _functions()}
    assert {at: n for at, n in lines.items() if n > MOST_FUNCTION_LINES} == {}


def test_a_constructor_has_few_arguments() -> None:
    made = {at: node.args for at, node in _functions() if node.name == "__init__"}
    counts = {
        at: len([*args.posonlyargs, *args.args, *args.kwonlyargs]) - 1 for at, args in made.items()
    }
    assert {at: n for at, n in counts.items() if n > MOST_ARGUMENTS} == {}


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
