"""The rules of the stand-in for the API server: validation, selection, copies
(tests/fake_api.py)."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from ipam.addresses import parse
from ipam.leases.block_layout import block_name
from ipam.leases.objects import AddressBlock, AddressPool
from kube.resources import AnyResource, Conflict, Refused, Resource

SELECTABLE: Mapping[str, frozenset[str]] = {
    "AddressBlock": frozenset(
        {
            "spec.holder.instance",
            "spec.holder.node",
            "spec.pool",
            "spec.state",
            "spec.sticky.reservation",
        }
    ),
    "AddressReservation": frozenset({"spec.pool"}),
}
IMMUTABLE: Mapping[str, tuple[str, ...]] = {
    "AddressPool": ("spec.range", "spec.network_name", "spec.shared"),
    "AddressBlock": (
        "spec.pool",
        "spec.range",
        "spec.sticky",
    ),
}

MOST_OPERATIONS = 10_000
"""Of one JSON patch: the limit of an API server (apiserver's handlers/patch.go)."""

Key = tuple[str, str, str]
"""Kind, namespace, name."""


def key(resource: Resource) -> Key:
    return resource.KIND, resource.metadata.namespace, resource.metadata.name


def copied(resource: AnyResource, kind: type[AnyResource] | None = None) -> AnyResource:
    """A copy through JSON, as between machines: no two copies share a dict, and types are correct.

    With a `kind`, the copy has that kind's form: some kinds are read in several forms.
    """
    return msgspec.json.decode(msgspec.json.encode(resource), type=kind or type(resource))


def patched(resource: AnyResource, operations: Sequence[Mapping[str, Any]]) -> AnyResource:
    """The resource after a JSON patch. Raises Conflict if a path is missing or a test fails."""
    document = msgspec.to_builtins(resource)
    if len(operations) > MOST_OPERATIONS:
        raise Refused(f"patch {resource.KIND} {resource.metadata.name}: {len(operations)} parts")
    for each in operations:
        *parents, last = each["path"].removeprefix("/").split("/")
        where = document
        failed = Conflict(f"patch {resource.KIND} {resource.metadata.name}: {each['path']}")
        for parent in parents:
            if parent not in where:
                raise failed
            where = where[parent]
        if each["op"] == "test":
            if where.get(last) != each["value"]:
                raise failed
            continue
        if last not in where and each["op"] != "add":
            raise failed
        if each["op"] == "remove":
            del where[last]
        else:
            where[last] = each["value"]
    return msgspec.convert(document, type=type(resource))


def without_status(resource: AnyResource) -> AnyResource:
    status = getattr(resource, "status", None)
    return resource if status is None else replace(resource, status=type(status)())


def with_status(resource: AnyResource, other: Resource) -> AnyResource:
    """`resource` with the status of `other`."""
    status = getattr(other, "status", None)
    return resource if status is None else replace(resource, status=status)


def _value(resource: Resource, path: str) -> str:
    value: object = resource
    for part in path.split("."):
        value = getattr(value, part)
    return str(value)


def selected(resource: Resource, fields: Mapping[str, str] | None, labels: str = "") -> bool:
    """Whether the fields and the labels ("key=value" and "key", with commas) select the object."""
    own = getattr(resource.metadata, "labels", {})
    parts = [part.partition("=") for part in labels.split(",") if part]
    return all(_value(resource, path) == wanted for path, wanted in (fields or {}).items()) and all(
        own.get(label) == value if equals else label in own for label, equals, value in parts
    )


def check_selector(kind: type[Resource], fields: Mapping[str, str] | None) -> None:
    known = SELECTABLE.get(kind.KIND, frozenset()) | {"metadata.name"}
    if unknown := set(fields or ()) - known:
        raise Refused(f"list {kind.KIND}: no selectable field {', '.join(sorted(unknown))}")


def check(new: Resource, last: Resource | None) -> None:
    """Check the CRDs' rules that our own defects are likely to break; a real server has all
    rules."""
    what = f"{new.KIND} {new.metadata.name}"
    if last is not None:
        for path in IMMUTABLE.get(new.KIND, ()):
            if _value(new, path) != _value(last, path):
                raise Refused(f"update {what}: {path} is immutable")
    if isinstance(new, AddressBlock):
        spec = new.spec
        first, _, prefix = spec.range.partition("/")
        if new.metadata.name != block_name(new.space, parse(first), int(prefix)):
            raise Refused(f"{what}: the name is not that of its addresses")
        if isinstance(last, AddressBlock):
            same_holder = spec.holder == last.spec.holder and spec.epoch == last.spec.epoch
            if not same_holder and spec.epoch != last.spec.epoch + 1:
                raise Refused(f"update {what}: epoch grows by 1 with the holder")
    if isinstance(new, AddressPool) and new.spec.block_size not in (0, *(2**k for k in range(9))):
        raise Refused(f"{what}: blockSize {new.spec.block_size} is not a power of two up to 256")
