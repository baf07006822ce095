"""A check of the rules of a node."""

from collections.abc import Iterator, Sequence

from base.documents import DocumentError
from cli.checks import Outcome, failed, not_applicable, ok, some
from cli.node.state import ThisNode
from cni.spec.errors import CNIError
from policy import rules, stored_policies
from policy.document import Rule


def rules_of_node(node: ThisNode) -> Iterator[Outcome]:
    """Whether the part `policy` of config.yaml and the followed policies can be read."""
    try:
        policy = rules.load(node.config_file)
    except (DocumentError, OSError) as error:
        yield failed(f"{error}: no pod gets an attachment", "correct the file")
        return
    if policy.cluster:
        try:
            found = stored_policies.load(node.paths.cluster_policies).rules
            yield ok(f"rules of the cluster: {_listed(found) or 'none'}")
        except CNIError as error:
            remedy = (
                "see the agent's log; on a node without an API server set policy.cluster to false"
            )
            yield failed(error.message, remedy)
    if policy.rules:
        yield ok(f"rules in config.yaml: {_listed(policy.rules)}")
    elif not policy.cluster:
        yield not_applicable("config.yaml has no rules: what it allows all pods counts")


def _listed(found: Sequence[Rule]) -> str:
    return some([rule.title for rule in found], most=20)
