"""A check of the rules of a node: that they can be read."""

from collections.abc import Iterator, Sequence

from base.documents import DocumentError
from cli.checks import Outcome, failed, not_applicable, ok
from cli.node.state import ThisNode
from cni.spec.errors import CNIError
from policy import rules, stored_policies
from policy.document import Rule

_SHOWN = 20  # rules


def rules_of_node(node: ThisNode) -> Iterator[Outcome]:
    """The part `policy` of the configuration, and the policies of the cluster that it follows."""
    try:
        policy = rules.load(node.config_file)
    except (DocumentError, OSError) as error:
        yield failed(f"{error}: no pod gets an attachment", "correct the file")
        return
    if policy.cluster:
        yield _of_cluster(node)
    if policy.rules:
        yield ok(f"rules in config.yaml: {_listed(policy.rules)}")
    elif not policy.cluster:
        yield not_applicable("config.yaml has no rules: what it allows all pods counts")


def _of_cluster(node: ThisNode) -> Outcome:
    """The policies of the cluster, as the agent wrote them last."""
    try:
        found = stored_policies.load(node.paths.cluster_policies).rules
    except CNIError as error:
        return failed(
            error.message,
            "see the agent's log; on a node without an API server set policy.cluster to false",
        )
    return ok(f"rules of the cluster: {_listed(found) or 'none'}")


def _listed(found: Sequence[Rule]) -> str:
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(rule.title for rule in found[:_SHOWN]) + more
