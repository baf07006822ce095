"""`podfabric policy`: shows which definitions the rules allow, before a pod uses them."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from base import documents
from base.documents import DocumentError
from base.pod import Pod
from cli import output
from cli.arguments import file, namespace
from cli.output import Cell, Table
from cni.ipoib import options as ipoib_options
from cni.macvlan import options as macvlan_options
from cni.spec import rail_keys
from cni.spec.config import decode
from cni.spec.errors import CNIError
from cni.spec.request import Request
from cni.sriov import options as sriov_options
from cni.sriov import vf_policy
from ipam import address_policy, store_choice
from ipam.delegation import OURS, TAKEN_OVER, require_allowed
from policy import allowance, rules
from policy.allowance import Allowance, NotAllowed
from policy.document import PART, Rule, rules_of
from policy.rules import Policy

SRIOV = ("sriov", "ib-sriov")
_NOTE = "Devices, and what only a node knows of them, are compared when a pod is attached."


class WrittenDefinition(msgspec.Struct, frozen=True):
    namespace: str
    name: str
    config: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one plugin of a definition, for the pods of a namespace."""

    definition: str
    namespace: str
    plugin: str
    allowed: bool
    rules: tuple[str, ...] = ()  # that allow the plugin, or the keys before a refused `key`
    key: str = ""
    value: str = ""
    said: str = ""  # the error text that a pod would get


class CheckInput:
    """The content of the files: definitions, rules, and the labels of namespaces."""

    def __init__(self) -> None:
        self.definitions: list[WrittenDefinition] = []
        self.rules: list[Rule] = []
        self.labels: dict[str, dict[str, str]] = {}
        self.node = Policy()  # the rules of a config.yaml

    def read(self, path: Path) -> None:
        """Add the content of a file. Raises DocumentError, OSError."""
        for index, document in enumerate(_documents(path)):
            self._take(documents.mapping(document, str(path)), f"{path}[{index}]")

    def _take(self, document: dict[str, Any], where: str) -> None:
        kind = document.get("kind")
        metadata = documents.mapping(document.get("metadata"), f"{where}: metadata")
        name = str(metadata.get("name", ""))
        spec = document.get("spec") if kind not in (None, "Namespace") else None
        if kind == "List":
            for index, item in enumerate(document.get("items") or ()):
                self._take(documents.mapping(item, where), f"{where}: items[{index}]")
        elif kind == "Namespace":
            shape = dict[str, str]
            labels = documents.convert(metadata.get("labels") or {}, shape, f"{where}: labels")
            self.labels[name] = labels
        elif kind == "FabricPolicy":
            listed = documents.mapping(spec, f"{where}: spec").get("rules")
            self.rules += rules_of(listed, f"{where}: spec.rules", name)
        elif kind == "NetworkAttachmentDefinition":
            config = documents.mapping(spec, f"{where}: spec").get("config")
            text = documents.convert(config or "", str, f"{where}: spec.config")
            if text:  # without it the configuration is a file of the node
                own = str(metadata.get("namespace") or "default")
                self.definitions.append(WrittenDefinition(own, name, text))
        elif kind is None and PART in document:
            self.node = rules.of(document[PART], where)

    @property
    def policy(self) -> Policy:
        """The rules of a config.yaml, followed by the rules of FabricPolicies."""
        return msgspec.structs.replace(self.node, rules=(*self.node.rules, *self.rules))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    check = actions.add_parser("check", help="which definitions the rules allow and refuse")
    check.add_argument(
        "files",
        nargs="+",
        type=file,
        metavar="FILE",
        help="definitions, FabricPolicies, Namespaces, or a config.yaml",
    )
    check.add_argument(
        "-n",
        "--namespace",
        action="append",
        default=[],
        type=namespace,
        help="also check for pods of this namespace, not only of the definition's; repeatable",
    )
    output.add_option(check)
    check.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the verdicts. Returns exit code 1 if a plugin is refused or a file cannot be read."""
    found = CheckInput()
    try:
        for path in arguments.files:
            found.read(path)
    except (DocumentError, OSError) as error:
        sys.stderr.write(f"podfabric policy: {error}\n")
        return 1
    judged = verdicts(found.definitions, found.policy, found.labels, arguments.namespace)
    if arguments.output != "table":
        output.document(judged)
    else:
        _show(judged)
    return 1 if any(not verdict.allowed for verdict in judged) else 0


def _show(judged: Sequence[Verdict]) -> None:
    rows = [
        (
            verdict.definition,
            verdict.namespace,
            verdict.plugin,
            Cell("allowed", "green") if verdict.allowed else Cell("refused", "bold red"),
            ", ".join(verdict.rules) if verdict.allowed else verdict.said,
        )
        for verdict in judged
    ]
    output.show(
        Table(
            ("DEFINITION", "FOR PODS OF", "PLUGIN", "", "BY RULES, OR WHY NOT"), rows, folded=True
        )
        if rows
        else "There is no NetworkAttachmentDefinition.",
        _NOTE,
    )


def _documents(path: Path) -> Iterator[object]:
    import yaml

    content = documents.read(path)
    try:
        # Not CSafeLoader, for the reason in base.documents.decode.
        yield from (it for it in yaml.safe_load_all(content) if it is not None)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        text = " ".join(str(error).split())
        raise DocumentError(f"{path}: is neither YAML nor JSON: {text}") from None


def verdicts(
    definitions: Sequence[WrittenDefinition],
    policy: Policy,
    labels: Mapping[str, Mapping[str, str]],
    namespaces: Sequence[str] = (),
) -> list[Verdict]:
    """Judge each definition for pods of its own namespace and of each of `namespaces`."""
    return [
        verdict
        for definition in definitions
        for namespace in dict.fromkeys((definition.namespace, *namespaces))
        for verdict in _of_definition(definition, namespace, policy, labels)
    ]


def _of_definition(
    definition: WrittenDefinition,
    namespace: str,
    policy: Policy,
    labels: Mapping[str, Mapping[str, str]],
) -> Iterator[Verdict]:
    policy = msgspec.structs.replace(policy, labels=lambda of: labels.get(of, {}))
    name, plugin = f"{definition.namespace}/{definition.name}", ""
    verdict = partial(Verdict, definition=name, namespace=namespace)
    try:
        for config in _plugins(definition):
            plugin = str(config.get("type", ""))
            allowed = allowance.of_pod(policy, Pod(namespace, "pod"))
            request = Request(
                command="ADD",
                args=f"K8S_POD_NAMESPACE={namespace};K8S_POD_NAME=pod",
                network=definition.name,
            )
            of_rails = [
                msgspec.structs.replace(request, config=decode(msgspec.json.encode(keys)))
                for keys in rail_keys.each(config)
            ]
            judged = [_judged(plugin, of_rail, allowed) for of_rail in of_rails]
            yield verdict(plugin=plugin, allowed=True, rules=judged[0].titles())
    except CNIError as error:
        refused = verdict(plugin=plugin, allowed=False, said=error.message)
        if isinstance(error, NotAllowed):
            refused = msgspec.structs.replace(
                refused, rules=error.rules, key=error.key, value=error.value
            )
        yield refused


def _plugins(definition: WrittenDefinition) -> list[dict[str, Any]]:
    whole = decode(definition.config.encode()).keys
    shared = {key: whole[key] for key in ("cniVersion",) if key in whole}
    listed = whole.get("plugins")
    if not isinstance(listed, list):
        return [whole]
    return [{**one, **shared, "name": definition.name} for one in listed if isinstance(one, dict)]


def _judged(plugin: str, request: Request, allowed: Allowance) -> Allowance:
    """The `Allowance` with the rules that are left after all checks. Raises CNIError 7 and 121."""
    if plugin == "ipoib":
        return _addresses(request, ipoib_options.allowed(ipoib_options.read(request), allowed))
    kind = plugin.removeprefix("podfabric-")
    if kind in macvlan_options.MODES:
        of_macvlan = macvlan_options.read(request, kind)
        return _addresses(request, macvlan_options.allowed(of_macvlan, allowed))
    if plugin in SRIOV:
        options = sriov_options.read(request, needs_device=False)
        return _addresses(request, vf_policy.by_options(options, allowed))
    if request.config.ipam.type in (OURS, *TAKEN_OVER):
        return _addresses(request, allowed)
    return allowed  # another project's plugin, with addresses of another IPAM plugin


def _addresses(request: Request, allowed: Allowance) -> Allowance:
    config = request.config.ipam
    if not config.type:
        return allowed
    if config.type in (OURS, *TAKEN_OVER):
        allowed = address_policy.of_type(allowed, config.type)
        return address_policy.of_configuration(allowed, *store_choice.declared(request))
    return require_allowed(config, allowed)
