"""The quick starts are small, every example explains itself, and its README lists them."""

from pathlib import Path

import pytest
import yaml

from tests.runtime import CHECKOUT
from tools.quick_start import EXAMPLES, QUICK_STARTS, Counted, counted, problems, table

README = (EXAMPLES / "README.md").read_text()
FILES = sorted(EXAMPLES.glob("*.yaml"))


@pytest.mark.parametrize("file", [quick.file for quick in QUICK_STARTS])
def test_quick_start_has_two_small_objects_and_no_name_of_an_interface(file: str) -> None:
    found = counted(EXAMPLES / file)
    assert len(found.objects) == 2
    assert problems(found) == []


def test_readme_has_the_table_of_the_quick_starts() -> None:
    assert "\n".join(table()) in README


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.stem))
def test_example_says_what_it_is_for_what_it_needs_and_how_to_see_it(path: Path) -> None:
    head = path.read_text().partition("apiVersion:")[0]
    places = [head.find(word) for word in ("# For: ", "# Needs: ", "# See: ")]
    assert places[0] == 0
    assert sorted(places) == places
    names = [doc["metadata"]["name"] for doc in yaml.safe_load_all(path.read_text())]
    assert names[-1] in head, "the pod that shows it"
    assert f"| `{path.name}` |" in README


DEFINITION = (
    'apiVersion: v1\nkind: NetworkAttachmentDefinition\nspec: {config: \'{"master": "%s"}\'}\n'
)
HEAD = """\
#   pools:
#     - {name: a/b, selectors: {pfNames: [ens1]}}
#   policy: {set: {pfOnly: [true]}}
# See: ens7
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (DEFINITION % "auto", Counted((3,), 0, ())),
        (
            f"{HEAD}{DEFINITION % 'ib0'}\n---\n# a comment\nkind: Pod\n",
            Counted((3, 1), 3, ("ens1", "ib0")),
        ),
    ],
)
def test_what_is_counted(text: str, found: Counted, tmp_path: Path) -> None:
    path = tmp_path / "example.yaml"
    path.write_text(text)
    assert counted(path) == found


def test_what_is_too_much() -> None:
    assert problems(Counted((26, 25, 1), 0, ("ib0",))) == [
        "3 objects, not 2",
        "26 lines, not 25",
        "the name ib0",
    ]


def test_the_makefile_runs_it() -> None:
    assert "tools.quick_start" in (CHECKOUT / "Makefile").read_text()
