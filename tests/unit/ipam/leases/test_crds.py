"""The kinds as the API server gets them are those of the code. tests/api has what the rules in
them refuse."""

import types
import typing
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
import yaml
from msgspec.structs import FieldInfo

from ipam.leases.objects import GROUP, VERSION, AddressBlock, AddressPool, AddressReservation
from kube.resources import Resource
from tests.fake_api_rules import SELECTABLE

CHECKOUT = Path(__file__).resolve().parents[4]
MANIFEST = CHECKOUT / "deploy/kustomize/base/podfabric.yaml"
Schema = dict[str, Any]
KINDS: tuple[type[Resource], ...] = (AddressPool, AddressBlock, AddressReservation)

CRDS: dict[str, Schema] = {
    each["spec"]["names"]["kind"]: each
    for each in yaml.safe_load_all(MANIFEST.read_text())
    if each and each["kind"] == "CustomResourceDefinition"
}


def version(kind: type[Resource]) -> Schema:
    """The one version of a kind."""
    (found,) = CRDS[kind.KIND]["spec"]["versions"]
    return typing.cast(Schema, found)


def properties(kind: type[Resource]) -> Schema:
    """`spec` and `status`."""
    return typing.cast(Schema, version(kind)["schema"]["openAPIV3Schema"]["properties"])


def compare(where: str, schema: Schema, type_: object) -> None:
    """That the schema takes the values of the type, and gives its defaults."""
    if isinstance(type_, types.UnionType):  # with None: the key is absent
        (type_,) = (each for each in get_args(type_) if each is not types.NoneType)
    if get_origin(type_) is Literal:
        assert schema["enum"] == list(get_args(type_)), where
    elif get_origin(type_) is tuple:
        assert schema["type"] == "array", where
        assert schema["maxItems"], where
        compare(f"{where}[]", schema["items"], get_args(type_)[0])
    elif get_origin(type_) is dict:
        assert schema["type"] == "object", where
        compare(f"{where}{{}}", schema["additionalProperties"], get_args(type_)[1])
    elif isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        compare_struct(where, schema, type_)
    else:
        names: dict[object, str] = {str: "string", int: "integer", bool: "boolean"}
        assert schema["type"] == names[type_], where
        if type_ is str and "enum" not in schema and "format" not in schema:
            assert schema["maxLength"], where


def compare_struct(where: str, schema: Schema, type_: type[msgspec.Struct]) -> None:
    """The same of a struct: each field, and which fields must be there."""
    fields = {each.encode_name: each for each in msgspec.structs.fields(type_)}
    assert sorted(schema["properties"]) == sorted(fields), where
    assert set(schema.get("required", ())) == {
        name for name, each in fields.items() if each.required
    }, where
    for name, each in fields.items():
        compare(f"{where}.{name}", schema["properties"][name], each.type)
        if where.startswith("spec") and "default" in schema["properties"][name]:
            written = schema["properties"][name]["default"]
            assert msgspec.convert(written, each.type) == default(each), f"{where}.{name}"
        elif where.startswith("spec") and where != "spec.holder":
            assert each.required, f"{where}.{name} has no default"


def default(field: FieldInfo) -> object:
    """The value that the code uses for a missing field."""
    if field.default is not msgspec.NODEFAULT:
        return field.default
    return field.default_factory()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.KIND)
def test_a_kind_is_that_of_the_code(kind: type[Resource]) -> None:
    spec = CRDS[kind.KIND]["spec"]
    assert spec["group"] == GROUP
    assert version(kind)["name"] == VERSION
    assert spec["names"]["plural"] == kind.PLURAL
    assert spec["scope"] == ("Namespaced" if kind is AddressReservation else "Cluster")
    types = {each.encode_name: each.type for each in msgspec.structs.fields(kind)}
    del types["metadata"]
    assert properties(kind).keys() == types.keys()
    for name, type_ in types.items():
        compare(name, properties(kind)[name], type_)
    assert ("status" in types) == ("status" in version(kind).get("subresources", {}))


def test_there_is_no_other_kind() -> None:
    assert CRDS.keys() == {*(kind.KIND for kind in KINDS), "FabricPolicy", "FabricNode"}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.KIND)
def test_the_stand_in_selects_by_the_same_fields(kind: type[Resource]) -> None:
    paths = {each["jsonPath"] for each in version(kind).get("selectableFields", ())}
    assert {f".{path}" for path in SELECTABLE.get(kind.KIND, ())} == paths
