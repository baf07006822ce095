"""A plain model of the policy: no bits, nothing kept, every rule read again for every question."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

Document = list[dict[str, Any]]


class Asker(msgspec.Struct, frozen=True):
    """A pod, as the model's rules see it."""

    namespace: str
    labels: Mapping[str, str]


class Wish(msgspec.Struct, frozen=True):
    """The values that an attachment requests. Options are pairs of key and value."""

    pkey: int | None = None
    vlan: int | None = None
    network_name: str | None = None
    options: tuple[tuple[str, Any], ...] = ()


def allowed(rules: Document, asker: Asker, wish: Wish) -> bool | None:
    """Whether the rules allow the wish. Returns `None` if no rule is for the pod."""
    matching = [rule for rule in rules if any(_is_for(each, asker) for each in rule["subjects"])]
    if not matching:
        return None
    options = all(
        any(_listed(value, rule.get("set", {}).get(key, ())) for rule in matching)
        for key, value in wish.options
    )
    return options and any(_allows_use(rule.get("use", {}), wish) for rule in matching)


def _allows_use(use: Mapping[str, Any], wish: Wish) -> bool:
    asked = (
        (wish.pkey, "pkeys"),
        (wish.vlan, "vlans"),
        (wish.network_name, "networkNames"),
    )
    return all(value is None or _listed(value, use.get(key, ())) for value, key in asked)


def _listed(value: Any, items: Sequence[Any]) -> bool:  # noqa: ANN401 - of any kind
    for item in items:
        if item == "*":
            return True
        if isinstance(value, bool) or isinstance(item, bool):
            same = value is item
        elif isinstance(value, int):
            first, _, last = str(item).partition("-")
            same = int(first, 0) <= value <= int(last or first, 0)
        else:
            same = _like(item, value)
        if same:
            return True
    return False


def _like(pattern: str, text: str) -> bool:
    if not pattern:
        return not text
    if pattern[0] == "*":
        return any(_like(pattern[1:], text[start:]) for start in range(len(text) + 1))
    return bool(text) and pattern[0] in ("?", text[0]) and _like(pattern[1:], text[1:])


def _is_for(subject: Mapping[str, Any], asker: Asker) -> bool:
    if "namespaces" in subject and not _listed(asker.namespace, subject["namespaces"]):
        return False
    selector = subject.get("namespaceSelector", {})
    wanted = selector.get("matchLabels", {})
    return all(asker.labels.get(key) == value for key, value in wanted.items()) and all(
        _met(each, asker.labels) for each in selector.get("matchExpressions", [])
    )


def _met(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    has, listed = expression["key"] in labels, labels.get(expression["key"])
    match expression["operator"]:
        case "In":
            return listed in expression["values"]
        case "NotIn":
            return listed not in expression["values"]
        case "Exists":
            return has
    return not has
