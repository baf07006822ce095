"""`podfabric policy`: what the rules of a policy say of definitions."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from base import documents
from base.documents import DocumentError
from base.paths import Paths
from cli import output
from cli.arguments import file, namespace
from cli.cluster_addresses import add_kubeconfig, connect
from cli.output import Cell, Table
from ipam.cluster.api import ApiError

if TYPE_CHECKING:
    from cli.policy_check import Verdict, WrittenDefinition
    from cni.policy.document import Rule
    from cni.policy.rules import Policy
    from ipam.cluster.api import ClusterApi

_NOTE = "Devices, and what only a node knows of them, are compared when a pod is attached."


class CheckInput:
    """What files or a cluster have: definitions, rules, and the labels of namespaces."""

    def __init__(self) -> None:
        self.definitions: list[WrittenDefinition] = []
        self.rules: list[Rule] = []
        self.labels: dict[str, dict[str, str]] = {}
        self.settings: Policy | None = None  # of a config.yaml

    def read(self, path: Path) -> None:
        """Add what a file holds. Raises DocumentError, OSError."""
        for index, document in enumerate(_documents(path)):
            self._take(documents.mapping(document, str(path)), f"{path}[{index}]")

    def _take(self, document: dict[str, Any], where: str) -> None:
        from cli.policy_check import WrittenDefinition
        from cni.policy import rules
        from cni.policy.document import PART, rules_of

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
            if text:  # without one the configuration is a file of the node
                own = str(metadata.get("namespace") or "default")
                self.definitions.append(WrittenDefinition(own, name, text))
        elif kind is None and PART in document:
            self.settings = rules.of(document[PART], where)

    def read_cluster(self, api: "ClusterApi") -> None:
        """Add what the API server has. Raises ApiError, DocumentError."""
        from agent.policy_follower import FabricPolicy, NamespaceObject
        from cli.policy_check import WrittenDefinition

        for policy in api.list(FabricPolicy).items:
            self.rules += policy.stored().read
        for each in api.list(NamespaceObject).items:
            self.labels[each.metadata.name] = each.metadata.labels
        self.definitions += (
            WrittenDefinition(each.namespace, each.name, each.config)
            for each in api.network_definitions()
            if each.config  # without one the configuration is a file of the node
        )

    def policy(self, paths: Paths) -> "Policy":
        """The rules that were found; those of this node if there are none."""
        from cni.policy import rules

        settings = self.settings
        if settings is None and not self.rules:
            return rules.load(paths.config)
        settings = settings or rules.Policy()
        return msgspec.structs.replace(settings, rules=(*settings.rules, *self.rules))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    check = actions.add_parser("check", help="what rules would allow and refuse")
    check.add_argument(
        "files",
        nargs="*",
        type=file,
        metavar="FILE",
        help="definitions, FabricPolicies, Namespaces, or a config.yaml; without rules in them, "
        "those of this node; without a file, what the API server has",
    )
    add_kubeconfig(check, "without a file")
    check.add_argument(
        "-n",
        "--namespace",
        action="append",
        default=[],
        type=namespace,
        help="also for pods of this namespace (default: that of each definition); repeatable",
    )
    output.add_option(check)
    check.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the verdicts; 1 if something is refused or cannot be read."""
    from cli.policy_check import KnownNamespaces, verdicts

    found = CheckInput()
    try:
        for path in arguments.files:
            found.read(path)
        if not arguments.files:
            found.read_cluster(connect(arguments.kubeconfig))
        policy = found.policy(Paths.from_environ(os.environ))
    except (ApiError, DocumentError, OSError) as error:
        sys.stderr.write(f"podfabric policy: {error}\n")
        return 1
    subjects = KnownNamespaces(found.labels)
    judged = verdicts(found.definitions, policy, subjects, arguments.namespace)
    if arguments.output != "table":
        output.document(judged, arguments.output)
    else:
        _show(judged)
    return 1 if any(not verdict.allowed for verdict in judged) else 0


def _show(judged: "Sequence[Verdict]") -> None:
    rows = [
        (
            verdict.definition,
            verdict.namespace
            + (f" as {verdict.service_account}" if verdict.service_account else ""),
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
    """The documents of a file, YAML or JSON. Raises DocumentError, OSError."""
    import yaml

    content = documents.read(path)
    try:
        # Not CSafeLoader: see base.documents.decode.
        yield from (each for each in yaml.safe_load_all(content) if each is not None)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        text = " ".join(str(error).split())
        raise DocumentError(f"{path}: neither YAML nor JSON: {text}") from None
