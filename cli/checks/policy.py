"""A check of the rules in config.yaml: that they can be read, and match somebody."""

from collections.abc import Iterator

from base.documents import DocumentError
from cli.checks import Outcome, failed, not_applicable, ok, warning
from cli.this_node import ThisNode
from cni.policy import rules
from cni.policy.document import Rule


def rules_of_node(node: ThisNode) -> Iterator[Outcome]:
    """The part `policy` of the configuration."""
    try:
        policy = rules.load(node.config_file)
    except (DocumentError, OSError) as error:
        yield failed(f"{error}: no pod gets an attachment", "correct the file")
        return
    if not policy.rules:
        yield not_applicable("config.yaml has no rules: the settings of the node count")
        return
    yield ok(f"rules in config.yaml: {', '.join(rule.title for rule in policy.rules)}")
    blind = [rule.title for rule in policy.rules if _looks_at_the_api_server(rule)]
    if blind:
        yield warning(
            f"{', '.join(blind)}: only the API server knows labels and service accounts, so these "
            "rules match nobody on a node that does not ask it",
            "name the namespaces, or write the rules as a FabricPolicy",
        )


def _looks_at_the_api_server(rule: Rule) -> bool:
    return all(
        subject.namespace_selector is not None or subject.service_accounts is not None
        for subject in rule.subjects
    )
