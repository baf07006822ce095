"""Write lists of the documentation from the code: `python -m tools.reference`.

A page has each list between `<!-- list NAME -->` and `<!-- end -->`. The code gives all words of
some lists, and only the names and traits of other items. A person writes their meanings in the
page; this program finds a meaning again by the name. tests/unit/test_reference.py compares the
pages with the code.
"""

import html
import json
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal
from unittest.mock import MagicMock

import msgspec
import yaml
from prometheus_client.metrics_core import Metric

from agent import leasing
from agent.observe import hca_metrics, pod_counters
from agent.observe import metrics as agent_metrics
from agent.policies import AgentPolicies
from agent.settings import Settings
from base.paths import Paths
from cni.spec.errors import Code
from deviceplugin import checkpoint
from gpu.watch.gpu_metrics import families
from gpu.watch.usage_watch import NodeSample
from ipam.controller import exposition
from ipam.store.reservations import RangeUsage
from ipam.store_choice import AddressSettings
from kube.encoding import unreadable_family
from policy.rules import Policy

CHECKOUT = Path(__file__).parents[1]
PAGES = sorted((CHECKOUT / "docs").rglob("*.md"))
VALUES = yaml.safe_load((CHECKOUT / "deploy/chart/values.yaml").read_text())
SCHEMA = json.loads((CHECKOUT / "deploy/chart/values.schema.json").read_text())
KINDS: Mapping[str, Mapping[str, Any]] = {
    each["spec"]["names"]["kind"]: each["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for each in yaml.safe_load_all((CHECKOUT / "deploy/kustomize/base/podfabric.yaml").read_text())
    # Nobody writes a FabricNode by hand: `kubectl explain` is enough.
    if each
    and each["kind"] == "CustomResourceDefinition"
    and each["spec"]["names"]["kind"] != "FabricNode"
}
LIST = re.compile(r"(<!-- list (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
ITEM = re.compile(r"^- `([^`]+)`(?: \([^)]*\))?:(.*(?:\n  .*)*)", re.MULTILINE)
_OF_GPU = ("gpu_uuid", "gpu")
ONCE = (_OF_GPU, ("namespace", "pod", "container", *_OF_GPU))
"""Labels that the page names once, for all metrics of a GPU and of a container."""
Items = Iterable[tuple[str, str]]
"""Name and traits (type, default) of each item; the page has the meaning."""

_ANY: Any = MagicMock()  # a process whose metrics have names, labels and texts, but no values
_NAMES: Mapping[object, str] = {int: "number", float: "number", str: "string", bool: "bool"}
_BETWEEN: Mapping[object, str] = {tuple: "[]", dict: ".KEY"}


def _shown(hint: object) -> str:
    """A type as the pages show it: "list of strings", "1–256", "object" for a struct."""
    hint = getattr(hint, "__supertype__", hint)  # of a NewType
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return f"{parts[1].ge}–{parts[1].le}"
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in parts)
    if origin is tuple:
        return f"list of {_shown(parts[0])}s"
    if origin is dict:
        return f"map from {_shown(parts[0])} to {_shown(parts[1])}"
    if origin is types.UnionType:
        return f"{_shown(parts[0])} or null"
    return _NAMES.get(hint, "object")


def _fields(struct: object, at: str, expanded: set[object]) -> Items:
    """The fields of a file with their paths (`hcas.KEY.id`); a struct's own fields appear once."""
    for key, hint in _hints(struct).items():
        yield f"{at}{key}", _shown(hint)
        between = _BETWEEN.get(typing.get_origin(hint), "")
        for part in (hint, *typing.get_args(hint)):
            if isinstance(part, type) and issubclass(part, msgspec.Struct) and part not in expanded:
                expanded.add(part)
                yield from _fields(part, f"{at}{key}{between}.", expanded)


def _settings(struct: type[msgspec.Struct], *without: str) -> Items:
    """The keys of a struct with their values and defaults."""
    for field in msgspec.structs.fields(struct):
        if field.name not in without:
            default = json.dumps(field.default).strip('"').removesuffix(".0")
            yield field.name, f"{_shown(_hints(struct)[field.name])}, default `{default}`"


def _hints(struct: object) -> Mapping[str, object]:
    return typing.get_type_hints(struct, include_extras=True)


def _values(at: str, values: Mapping[str, Any], schema: Mapping[str, Any]) -> Items:
    """The values of the chart with their defaults."""
    for key, value in values.items():
        of_key = schema["properties"][key]
        if value and "properties" in of_key and key not in ("resources", "updateStrategy"):
            yield from _values(f"{at}{key}.", value, of_key)
        else:
            shown = yaml.safe_dump([value], default_flow_style=True, width=1000).strip()[1:-1]
            yield f"{at}{key}", f"`{shown}`"


def _item(name: str, text: str, *traits: str) -> str:
    inside = ", ".join(filter(None, traits))
    line = f"- `{name}`{f' ({inside})' if inside else ''}: {text}"
    return textwrap.fill(line, 118, subsequent_indent="  ", break_on_hyphens=False) + "\n"


def _families(found: Iterable[Metric]) -> Iterator[str]:
    for family in (each for each in found if each.name.startswith("podfabric_")):
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        sampled = {name: 0 for each in family.samples for name in each.labels if name != "le"}
        names = tuple(getattr(family, "_labelnames", sampled))
        traits = [f"`{name}`" for name in names if names not in ONCE]
        if family.type not in ("counter", "gauge"):
            traits.append(family.type)
        text = html.escape(family.documentation, quote=False)
        yield _item(family.name + suffix, text, *traits)


def _agent() -> Iterable[Metric]:
    usage = [RangeUsage("", "10.0.0.0/24", 3, 251)]
    metrics = agent_metrics.Metrics((), lambda: usage, dict, by_range=True)
    metrics.watch(_ANY, lambda: 0)
    metrics.observe("ipoib", "ADD", 0, 0.1)
    metrics.refused("")
    metrics.add(
        AgentPolicies(Paths(), Policy).families,
        lambda: [unreadable_family(())],
        lambda: leasing.families(_ANY),
        lambda: [*hca_metrics.families((), ()), hca_metrics.objects(())],
        lambda: pod_counters.families(Paths(state=Path("/nonexistent"))),
        lambda: [agent_metrics.devices((), {}), agent_metrics.mistakes({})],
    )
    return metrics._registry.collect()


def _described(at: str, schema: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The fields of a kind; docs/use/policy.md has the keys within `use`, `set` and `fixed`."""
    for key, field in schema.get("properties", {}).items():
        text, inner = field.get("description", ""), field.get("items", field)
        leaf = "properties" not in inner and "[]" not in at
        if at.count(".") < 3 and ((text and at) or leaf):
            values = ", ".join(f"`{value}`" for value in field.get("enum", ()) if value)
            default = json.dumps(field.get("default", {}))
            traits = [values or field["type"].removesuffix("string")]
            if default not in ("{}", "[]", '""'):
                traits.append(f"default `{default}`")
            yield _item(f"{at}{key}", html.escape(text or above, quote=False), *traits)
        below = f"{at}{key}{'[]' if 'items' in field else ''}."
        yield from _described(below, inner, text or above)


ITEMS: Mapping[str, Callable[[], Items]] = {
    "agent": lambda: _settings(Settings, "policy", "ipam"),
    "ipam": lambda: _settings(AddressSettings),
    "values": lambda: _values("", VALUES, SCHEMA),
    "errors": lambda: ((f"{code}", code.name) for code in Code),
    "checkpoint": lambda: _fields(checkpoint.CheckpointFile, "", set()),
}
"""Lists whose meanings the pages have."""
LISTS: Mapping[str, Callable[[], Iterable[str]]] = {
    "metrics-agent": lambda: _families(_agent()),
    "metrics-gpu": lambda: _families(families(NodeSample(at=0.0), {}, 0.0, 0.0)),
    "metrics-controller": lambda: _families(exposition._families(_ANY)),
    **{kind: partial(_described, "", schema) for kind, schema in KINDS.items()},
}
"""Lists whose meanings the code has."""


def _content(name: str, present: str) -> str:
    if name in LISTS:
        return "".join(LISTS[name]())
    kept = {found[1]: " ".join(found[2].split()) for found in ITEM.finditer(present)}
    return "".join(_item(key, kept.get(key, ""), traits) for key, traits in ITEMS[name]())


def filled(page: str) -> str:
    """The page with each of its lists as the code has it."""
    return LIST.sub(lambda found: f"{found[1]}\n{_content(found[2], found[3])}\n{found[4]}", page)


def main() -> None:
    """Write the pages."""
    for path in PAGES:
        path.write_text(filled(path.read_text()))


if __name__ == "__main__":
    main()
