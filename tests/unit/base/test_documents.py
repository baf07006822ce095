"""Administrators' files in YAML and JSON: no key is lost silently."""

import pytest

from base import documents
from base.documents import DocumentError


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"pools": [], "pools": [1]}', "line 1: pools"),
        ('{"agent": {"debug": true,\n"debug": true}}', "line 2: debug"),
        ('{"pools": [{"name": "a/b"}, {"slots": 4, "mode": "all", "slots": 8}]}', "line 1: slots"),
        ('{"a": [[{"b": {"c": 1, "c": {}}}]]}', "line 1: c"),
        ('{"slots": 1, "sl\\u006fts": 2}', "line 1: slots"),
        ('{"": 1, "": 2}', 'line 1: ""'),
        ('{"a": {"b": 1, "b": 2}, "a": 3}', "line 1: b"),
        ('{\n\t"a": 1e300,\n\t"b": 123456789012345678901234567890,\n\t"a": 1}', "line 4: a"),
    ],
)
def test_a_key_that_is_twice_in_json_is_named(content: str, text: str) -> None:
    with pytest.raises(DocumentError) as raised:
        documents.decode(content.encode(), "config.yaml")
    assert str(raised.value) == f"config.yaml: {text}: appears twice: keep one"


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ('{"a": {"b": 1}, "b": [{"b": 1}, {"b": 1}]}', {"a": {"b": 1}, "b": [{"b": 1}] * 2}),
        ('{"a": 1, "A": 2, "a.b": {}, "a b": ""}', {"a": 1, "A": 2, "a.b": {}, "a b": ""}),
        ('{"": 1, "\\"\\"": 2}', {"": 1, '""': 2}),
        ('{"a.b": 1, "a": {"b": 2}}', {"a.b": 1, "a": {"b": 2}}),
        (' {\n\t"a": [1, "1", 1.5, null, true]}\n', {"a": [1, "1", 1.5, None, True]}),
        ("{}", {}),
    ],
)
def test_different_keys_are_kept(content: str, value: object) -> None:
    assert documents.decode(content.encode(), "config.yaml") == value


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3: a: appears twice: keep one"),
        ("{a: {b: 1, b: 2}}", "line 1: b: appears twice: keep one"),
        ("pools:\n  - name: x\n    name: y\n", "line 3: name: appears twice: keep one"),
    ],
)
def test_a_key_that_is_twice_in_yaml_is_named(content: str, text: str) -> None:
    with pytest.raises(DocumentError) as raised:
        documents.decode(content.encode(), "config.yaml")
    assert str(raised.value) == f"config.yaml: {text}"


@pytest.mark.parametrize("depth", [500, 900, 5000, 100_000])
def test_deep_nesting_is_an_error_or_a_value(depth: int) -> None:
    content = b'{"a":' * depth + b"1" + b"}" * depth
    try:
        value = documents.decode(content, "config.yaml")
    except DocumentError as error:
        assert str(error) == "config.yaml: nested too deeply"
    else:
        assert isinstance(value, dict)
