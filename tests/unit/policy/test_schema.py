"""The kind FabricPolicy has just the keys that the agent reads. tests/api has what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from host.sysfs.selectors import OWN
from policy import document, value_lists

CHECKOUT = Path(__file__).resolve().parents[3]
MANIFEST = CHECKOUT / "deploy/kustomize/base/podfabric.yaml"
(CRD,) = (
    each
    for each in yaml.safe_load_all(MANIFEST.read_text())
    if each and each["metadata"]["name"] == "fabricpolicies.fabric.podfabric.io"
)
(VERSION,) = CRD["spec"]["versions"]
RULES = VERSION["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["rules"]


def inner(*path: str) -> dict[str, Any]:
    """The schema of a key of a rule; "" is an item of a list."""
    schema: dict[str, Any] = RULES["items"]
    for key in path:
        schema = schema["items"] if key == "" else schema["properties"][key]
    return schema


def keys(*path: str) -> set[str]:
    return set(inner(*path)["properties"])


def test_keys_are_those_of_the_agent() -> None:
    assert keys() == {"name", "subjects", "use", "set", "fixed"}
    assert keys("set") == {*document.SETTABLE, "hostPaths"}
    assert keys("fixed") == set(document.FIXABLE)
    assert keys("use") == {"devices", *document.USE, *document.COUNTS}
    assert keys("use", "devices", "") == set(OWN)
    assert keys("subjects", "") == {"namespaces", "namespaceSelector"}


@pytest.mark.parametrize(
    ("most", "schema"),
    [
        (document.RULES, RULES),
        (document.SUBJECTS, inner("subjects")),
        *((value_lists.ITEMS, inner("use", key)) for key in sorted(keys("use"))),
        *((value_lists.ITEMS, inner("set", key)) for key in sorted(keys("set"))),
    ],
)
def test_a_list_is_no_longer_than_the_agent_reads(most: int, schema: dict[str, Any]) -> None:
    if schema["type"] == "array":
        assert 0 < schema["maxItems"] <= most
    else:
        assert schema["maximum"] == document.HIGHEST_COUNT


def test_the_documentation_has_the_limits() -> None:
    text = (CHECKOUT / "docs/reference/objects.md").read_text().partition("## FabricPolicy")[2]
    rules, subjects = RULES["maxItems"], inner("subjects")["maxItems"]
    items = inner("use", "pkeys")["maxItems"]
    assert f"at most {rules} rules, a rule {subjects} subjects, a list {items} items" in text
