"""Evaluates a NodeSelector of core/v1 (k8s.io/component-helpers/scheduling/corev1)."""

from collections.abc import Callable, Mapping, Sequence

import msgspec


class Requirement(msgspec.Struct, frozen=True):
    """A requirement on one label or field of a node."""

    key: str
    operator: str
    values: tuple[str, ...] | None = None


class SelectorTerm(msgspec.Struct, frozen=True, rename="camel"):
    """All requirements must be met. A term without any selects no node."""

    match_expressions: tuple[Requirement, ...] | None = None
    match_fields: tuple[Requirement, ...] | None = None


class NodeSelector(msgspec.Struct, frozen=True, rename="camel"):
    """One of the terms must select the node."""

    node_selector_terms: tuple[SelectorTerm, ...] | None = None


def selects(selector: NodeSelector | None, name: str, labels: Mapping[str, str]) -> bool:
    """Whether the selector selects a node with this name and these labels."""
    if selector is None:
        return True
    return any(_meets(term, name, labels) for term in selector.node_selector_terms or ())


def _meets(term: SelectorTerm, name: str, labels: Mapping[str, str]) -> bool:
    expressions, fields = term.match_expressions or (), term.match_fields or ()
    if not expressions and not fields:
        return False
    return all(_is_met(each, labels) for each in expressions) and all(
        # For a field, Kubernetes accepts only these operators and one value.
        each.operator in ("In", "NotIn")
        and len(each.values or ()) == 1
        and _is_met(each, {"metadata.name": name})
        for each in fields
    )


def _is_met(requirement: Requirement, labels: Mapping[str, str]) -> bool:
    value = labels.get(requirement.key)
    check = _OPERATORS.get(requirement.operator)
    return check is not None and check(value, requirement.values or ())


def _compared(value: str | None, bounds: Sequence[str]) -> int | None:
    """The difference of value and bound; `None` if they cannot be compared."""
    try:
        return int(value or "") - int(bounds[0]) if len(bounds) == 1 else None
    except ValueError:
        return None


_OPERATORS: Mapping[str, Callable[[str | None, Sequence[str]], bool]] = {
    "In": lambda value, values: value is not None and value in values,
    "NotIn": lambda value, values: value is None or value not in values,
    "Exists": lambda value, values: value is not None,
    "DoesNotExist": lambda value, values: value is None,
    "Gt": lambda value, values: (_compared(value, values) or 0) > 0,
    "Lt": lambda value, values: (_compared(value, values) or 0) < 0,
}
