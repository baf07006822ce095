"""`podfabric policy`: what the rules of a policy say of definitions."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from base import documents
from base.documents import DocumentError
from cli import output
from cli.arguments import file, namespace
from cli.output import Cell, Table

if TYPE_CHECKING:
    from cli.policy_check import Verdict, WrittenDefinition
    from policy.document import Rule
    from policy.rules import Policy

_NOTE = "Devices, and what only a node knows of them, are compared when a pod is attached."


class CheckInput:
    """What files have: definitions, rules, and the labels of namespaces."""

    def __init__(self) -> None:
        from policy.rules import Policy

        self.definitions: list[WrittenDefinition] = []
        self.rules: list[Rule] = []
        self.labels: dict[str, dict[str, str]] = {}
        self.node = Policy()  # of a config.yaml

    def read(self, path: Path) -> None:
        """Add what a file holds. Raises DocumentError, OSError."""
        for index, document in enumerate(_documents(path)):
            self._take(documents.mapping(document, str(path)), f"{path}[{index}]")

    def _take(self, document: dict[str, Any], where: str) -> None:
        from cli.policy_check import WrittenDefinition
        from policy import rules
        from policy.document import PART, rules_of

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
            self.node = rules.of(document[PART], where)

    @property
    def policy(self) -> "Policy":
        """The rules that were found, behind those of a config.yaml."""
        return msgspec.structs.replace(self.node, rules=(*self.node.rules, *self.rules))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    check = actions.add_parser("check", help="what rules would allow and refuse")
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
        help="also for pods of this namespace (default: that of each definition); repeatable",
    )
    output.add_option(check)
    check.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the verdicts; 1 if something is refused or cannot be read."""
    from cli.policy_check import verdicts

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


def _show(judged: "Sequence[Verdict]") -> None:
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
    """The documents of a file, YAML or JSON. Raises DocumentError, OSError."""
    import yaml

    content = documents.read(path)
    try:
        # Not CSafeLoader: see base.documents.decode.
        yield from (each for each in yaml.safe_load_all(content) if each is not None)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        text = " ".join(str(error).split())
        raise DocumentError(f"{path}: neither YAML nor JSON: {text}") from None
