"""Parses the rules in config.yaml and in FabricPolicies. docs/use/policy.md describes each key."""

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec

from base import documents
from base.documents import DocumentError
from cni.spec.config import SERVED
from cni.spec.errors import CNIError, Code
from host.sysfs import selectors
from host.sysfs.selectors import Selector
from policy import value_lists
from policy.value_lists import NOTHING, Kind, Values

PART = "policy"
"""The top-level key of config.yaml."""

RULES = 256  # at most, in one document
SUBJECTS = 64  # at most, in one rule
LABELS = 64  # requirements, at most, in one selector
HIGHEST_COUNT = 1 << 24  # the highest limit of addresses

_COUNT = Annotated[int, msgspec.Meta(ge=0, le=HIGHEST_COUNT)]

Operator = Literal["In", "NotIn", "Exists", "DoesNotExist"]
EVERY_DEVICE = Selector()
_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


class LabelRequirement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A requirement on one label, as in a label selector of Kubernetes."""

    key: Annotated[str, msgspec.Meta(min_length=1)]
    operator: Operator
    values: tuple[str, ...] = ()

    def met_by(self, labels: Mapping[str, str]) -> bool:
        """Whether the labels meet the requirement. A missing label meets NotIn, but not In."""
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels


def unknown(what: str, why: str = "") -> CNIError:
    """The error of an ADD while `what` is unknown. Unknown rules never count as empty rules."""
    because = f" ({why})" if why else ""
    return CNIError(
        Code.TRY_AGAIN,
        f'"{PART}.cluster" is true, but this node has not read {what}{because}: nothing was done, '
        "the runtime tries again. Check whether the agent runs and reaches the API server",
    )


def no_labels(namespace: str) -> Mapping[str, str]:
    """Raise CNIError 11, because the labels of all namespaces are unknown."""
    raise unknown(f'the labels of namespace "{namespace}"')


Labels = Callable[[str], Mapping[str, str]]
"""Returns the labels of a namespace. Raises CNIError 11 if the labels are unknown."""


class Subject(msgspec.Struct, frozen=True):
    """Pods that a rule is for. Both fields must match. A field that is `None` matches every pod."""

    namespaces: Values | None = None
    namespace_selector: tuple[LabelRequirement, ...] | None = None

    def matches(self, namespace: str, labels: Labels) -> bool:
        """Whether the subject matches the pods of a namespace. Raises the errors of `labels`."""
        if self.namespaces is not None and not self.namespaces.allows(namespace):
            return False
        if self.namespace_selector is None:
            return True
        present = labels(namespace)
        return all(requirement.met_by(present) for requirement in self.namespace_selector)


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One rule. The keys of `allowed` and `fixed` are keys of network configurations."""

    name: str
    policy: str = ""  # the FabricPolicy's name; "" in config.yaml
    subjects: tuple[Subject, ...]
    devices: tuple[Selector, ...] = ()
    use: Mapping[str, Values] = {}  # by keys of USE; an unlisted value is not allowed
    counts: Mapping[str, int] = {}  # by keys of COUNTS; a missing key means no limit
    allowed: Mapping[str, Values] = {}  # the values in "set"
    host_paths: tuple[str, ...] = ()  # the directories of hostPaths
    fixed: Mapping[str, Any] = {}  # values as a definition has them

    @property
    def title(self) -> str:
        """The rule's name in errors and events: "team-a", or "POLICY/team-a" of a FabricPolicy."""
        return f"{self.policy}/{self.name}" if self.policy else self.name

    def is_for(self, namespace: str, labels: Labels) -> bool:
        """Whether the rule is for the pods of a namespace. Raises the errors of `labels`."""
        return any(subject.matches(namespace, labels) for subject in self.subjects)


SETTABLE: Mapping[str, Kind] = {
    "accept_ra": "switch",
    "allmulti": "switch",
    "link_state": "name",
    "match_device": "switch",
    "max_tx_rate": "number",
    "min_tx_rate": "number",
    "mtu": "number",
    "pfOnly": "switch",
    "private_ranges": "switch",
    "promisc": "switch",
    "proxy_arp": "switch",
    "scope": "name",
    "spoofchk": "switch",
    "trust": "switch",
    "unassigned_devices": "switch",
    "vlanProto": "name",
    "vlanQoS": "number",
}
"""The keys of `set` except `hostPaths`."""

FIXABLE: Mapping[str, Kind] = {
    **{
        key: SETTABLE[key]
        for key in (
            *("allmulti", "link_state", "max_tx_rate", "min_tx_rate", "mtu", "promisc"),
            *("proxy_arp", "spoofchk", "trust", "vlanProto", "vlanQoS"),
        )
    },
    "pkey": "pkey",
    "vlan": "vlan",
}
"""Options that `fixed` may set where a definition does not set the option."""

_HOST_PATHS = "hostPaths"
USE: Mapping[str, Kind] = {
    "pools": "name",  # resources of the pod's device; `devices` is the alternative
    "pkeys": "pkey",  # 16 bits, with the bit of a full member
    "vlans": "vlan",
    "guids": "guid",
    "macs": "mac",
    "ipamTypes": "name",
    "networkNames": "name",
    "ranges": "network",
}
COUNTS = ("addressesPerAttachment", "addressesPerPod", "addressesPerNamespace")
"""Limits of addresses. They count only the addresses on this node."""


def rules_of(value: object, where: str, policy: str = "") -> tuple[Rule, ...]:
    """Parse a list of rules. `policy` names the rules' FabricPolicy. Raises DocumentError."""
    rules: dict[str, Rule] = {}
    for index, item in enumerate(_list(value, RULES, where)):
        rule = _rule(item, f"{where}[{index}]", policy)
        if rule.name in rules:
            raise DocumentError(
                f"{where}[{index}].name: {documents.shown(rule.name)}: another rule has this name: "
                "choose another name"
            )
        rules[rule.name] = rule
    return tuple(rules.values())


NODE = "config.yaml"
"""The name of the node's rule for pods without another rule."""
_OF_NODE: Mapping[str, Mapping[str, Any]] = {
    "use": {
        **{key: [value_lists.ANY] for key in ("devices", *USE)},
        "ipamTypes": [*SERVED, "dhcp", "host-local", "static"],
    },
    "set": {
        **{key: [value_lists.ANY] for key in SETTABLE},
        "match_device": [True],
        **{key: [False] for key in ("pfOnly", "private_ranges", "unassigned_devices")},
        _HOST_PATHS: [],
    },
}
"""The safe defaults for keys that the administrator of the node leaves out."""


def rule_of_node(part: Mapping[str, Any] | None = None, where: str = PART) -> Rule:
    """Parse the rule for pods without another rule. Raises DocumentError."""
    document = {key: value for key, value in (part or {}).items() if value is not None}
    for key, defaults in _OF_NODE.items():
        document[key] = {**defaults, **documents.mapping(document.get(key), f"{where}.{key}")}
    return _rule({**document, "name": NODE, "subjects": [{"namespaces": ["*"]}]}, where, "")


def _rule(value: object, where: str, policy: str) -> Rule:
    keys = ("name", "subjects", "use", "set", "fixed")
    fields = _keys(value, keys, where)
    for key in ("name", "subjects"):
        if key not in fields:
            raise DocumentError(f"{where}.{key}: is missing: every rule needs this key")
    name = documents.convert(fields["name"], str, f"{where}.name")
    if not _NAME.fullmatch(name):
        raise DocumentError(
            f"{where}.name: {documents.shown(name)}: write at most 63 letters, digits, '-', '_' "
            "and '.', with a letter or digit at both ends"
        )
    settings = _settings(fields.get("set"), f"{where}.set")
    return Rule(
        name=name,
        policy=policy,
        subjects=_subjects(fields["subjects"], f"{where}.subjects"),
        **_use(fields.get("use"), f"{where}.use"),
        host_paths=settings.pop(_HOST_PATHS, NOTHING).names,
        allowed=settings,
        fixed=_fixed(fields.get("fixed"), f"{where}.fixed"),
    )


def _subjects(value: object, where: str) -> tuple[Subject, ...]:
    subjects = _list(value, SUBJECTS, where)
    if not subjects:
        raise DocumentError(f'{where}: is empty: for all pods write [{{namespaces: ["*"]}}]')
    return tuple(_subject(item, f"{where}[{index}]") for index, item in enumerate(subjects))


def _subject(value: object, where: str) -> Subject:
    fields = _keys(value, ("namespaces", "namespaceSelector"), where)
    if not fields:
        raise DocumentError(f'{where}: is empty: write namespaces: ["*"] for all namespaces')
    namespaces = selector = None
    if "namespaces" in fields:
        namespaces = value_lists.read(fields["namespaces"], "name", f"{where}.namespaces")
        if namespaces == NOTHING:
            raise DocumentError(
                f"{where}.namespaces: is empty and matches no pod: fill the list or remove the key"
            )
    if "namespaceSelector" in fields:
        selector = _selector(fields["namespaceSelector"], f"{where}.namespaceSelector")
    return Subject(namespaces, selector)


class _LabelSelector(msgspec.Struct, forbid_unknown_fields=True):
    matchLabels: dict[str, str] = {}
    matchExpressions: tuple[LabelRequirement, ...] = ()


def _selector(value: object, where: str) -> tuple[LabelRequirement, ...]:
    written: _LabelSelector = documents.convert(value, _LabelSelector, where)
    labels, expressions = sorted(written.matchLabels.items()), written.matchExpressions
    if len(labels) + len(expressions) > LABELS:
        raise DocumentError(f"{where}: has more than {LABELS} requirements: remove some")
    for index, requirement in enumerate(expressions):
        lists = requirement.operator in ("In", "NotIn")
        if lists != bool(requirement.values) or len(requirement.values) > value_lists.ITEMS:
            raise DocumentError(
                f"{where}.matchExpressions[{index}].values: operator {requirement.operator} "
                + (
                    f"needs 1 to {value_lists.ITEMS} values"
                    if lists
                    else "takes no values: remove them"
                )
            )
    return (*(LabelRequirement(key, "In", (value,)) for key, value in labels), *expressions)


def _use(value: object, where: str) -> dict[str, Any]:
    """Parse `use` into the fields `devices`, `use` and `counts` of a Rule."""
    fields = _keys(value, ("devices", *USE, *COUNTS), where)
    devices = _list(fields.get("devices"), value_lists.ITEMS, f"{where}.devices")
    return {
        "devices": tuple(
            EVERY_DEVICE
            if item == value_lists.ANY
            else selectors.parse(item, f"{where}.devices[{index}]")
            for index, item in enumerate(devices)
        ),
        "use": {
            key: value_lists.read(fields[key], kind, f"{where}.{key}")
            for key, kind in USE.items()
            if key in fields
        },
        "counts": {
            key: documents.convert(fields[key], _COUNT, f"{where}.{key}")
            for key in COUNTS
            if key in fields
        },
    }


def _settings(value: object, where: str) -> dict[str, Values]:
    kinds: dict[str, Kind] = {**SETTABLE, _HOST_PATHS: "directory"}
    settings = {
        key: value_lists.read(item, kinds[key], f"{where}.{key}")
        for key, item in _keys(value, kinds, where).items()
    }
    if settings.get(_HOST_PATHS, NOTHING).any:
        settings[_HOST_PATHS] = Values(names=("/",))
    return settings


def _fixed(value: object, where: str) -> dict[str, Any]:
    fields = _keys(value, FIXABLE, where)
    for key, item in fields.items():
        # Checked before `one`, which would report another mistake for a number with "*".
        is_pattern = isinstance(item, str) and ("*" in item or "?" in item)
        read = "" if is_pattern else value_lists.one(item, FIXABLE[key], f"{where}.{key}")
        first, last = (read, read) if isinstance(read, str) else read
        if is_pattern or first != last:
            raise DocumentError(
                f"{where}.{key}: {documents.shown(item)}: write one value, no range or pattern"
            )
        fields[key] = bool(first) if FIXABLE[key] == "switch" else first
    for key in ("vlanProto", "vlanQoS"):
        if key in fields and "vlan" not in fields:
            raise DocumentError(f"{where}.{key}: needs a vlan: add the key vlan")
    return fields


def _keys(value: object, keys: Mapping[str, Any] | tuple[str, ...], where: str) -> dict[str, Any]:
    return documents.fields(value, dict.fromkeys(keys, object), where)


def _list(value: object, most: int, where: str) -> list[Any]:
    items: list[Any] = documents.convert(value if value is not None else [], list[Any], where)
    if len(items) > most:
        raise DocumentError(
            f"{where}: has {len(items)} items, at most {most} are allowed: remove items"
        )
    return items
