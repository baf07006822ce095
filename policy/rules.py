"""The rules of one node: rules for some pods, and one rule for all other pods.

    policy:
      set: {pfOnly: [true]}
      rules: [...]

docs/use/policy.md describes every key.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec

from base import documents
from base.documents import DocumentError
from cni.spec.errors import CNIError, Code
from policy import document
from policy.document import PART, Labels, Rule


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of network configurations on this node. The defaults are safe."""

    rules: tuple[Rule, ...] = ()
    # The rule for all other pods.
    otherwise: Rule = document.rule_of_node()
    # Whether the rules of FabricPolicies are added (policy/stored_policies.py).
    cluster: bool = False
    labels: Labels = document.no_labels


SHAPES = {"use": object, "set": object, "fixed": object, "rules": object, "cluster": bool}
"""The keys of the section `policy`."""

Source = Callable[[], Policy]
"""Returns the current rules. Raises CNIError if they cannot be read."""


def on_node(path: Path) -> Source:
    """A source of the rules in the configuration file at `path`. It reads the file at each call."""

    def read() -> Policy:
        try:
            return load(path)
        except (DocumentError, OSError) as error:
            raise CNIError(
                Code.IO_FAILURE,
                f"cannot read the rules of this node ({error}): nothing was done; correct {path}",
            ) from None

    return read


def load(path: Path) -> Policy:
    """Read the rules. Returns the defaults without a file. Raises DocumentError, OSError."""
    try:
        content = documents.read(path)
    except (FileNotFoundError, NotADirectoryError):
        return Policy()
    whole = documents.mapping(documents.decode(content, str(path)), str(path))
    return of(whole.get(PART), str(path))


def of(part: object, name: str) -> Policy:
    """Parse the rules in the section `policy` of the file `name`. Raises DocumentError."""
    where = f"{name}: {PART}"
    values = documents.fields(part, SHAPES, where)
    rules = document.rules_of(values.pop("rules", None), f"{where}.rules")
    cluster = values.pop("cluster", False)
    for subject in (subject for rule in rules for subject in rule.subjects):
        if subject.namespace_selector is not None:
            raise DocumentError(
                f"{where}.rules: namespaceSelector works only in a FabricPolicy: name "
                "the namespaces, or write a FabricPolicy"
            )
    otherwise = document.rule_of_node(values, where) if values else Policy().otherwise
    return Policy(rules=rules, otherwise=otherwise, cluster=cluster)
