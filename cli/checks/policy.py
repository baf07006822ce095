"""A check of the rules of a node: that they can be read, and what of the node they would refuse."""

from collections.abc import Iterator, Sequence

from base.documents import DocumentError
from base.text import printable
from cli.checks import Outcome, failed, not_applicable, ok, warning
from cli.policy_check import KnownNamespaces, WrittenDefinition, verdicts
from cli.this_node import ThisNode
from cni.attachments.journal import Journal, JournalDamaged
from cni.policy import cluster, rules
from cni.policy.document import Rule
from cni.spec.errors import CNIError

_SHOWN = 20  # rules
_TOLD = 5  # attachments


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
        return
    yield from _refused_now(node)


def _of_cluster(node: ThisNode) -> Outcome:
    """The policies of the cluster, as the agent wrote them last."""
    try:
        found = cluster.load(node.paths.cluster_policies).rules
    except CNIError as error:
        return failed(
            error.message,
            "see the agent's log; on a node without an API server set policy.cluster to false",
        )
    return ok(f"rules of the cluster: {_listed(found) or 'none'}")


def _refused_now(node: ThisNode) -> Iterator[Outcome]:
    """Attachments that run, and that the rules would refuse to make again: rules change later."""
    try:
        policy = cluster.on_node(node.paths)[0]()
        labels = cluster.load(node.paths.cluster_policies).namespaces if policy.cluster else None
        boot_id = node.paths.boot_id()
    except (CNIError, OSError):
        return  # said above; without a boot id nothing is known of what runs
    subjects = KnownNamespaces(labels or {})
    refused = []
    for entry in Journal(node.paths).entries():
        if isinstance(entry, JournalDamaged) or entry.boot_id != boot_id or not entry.pod_name:
            continue
        written = WrittenDefinition(entry.pod_namespace, entry.network, entry.config)
        found = verdicts([written], policy, subjects)
        # Of which service account the pod is only the API server knows.
        if found and not any(verdict.allowed for verdict in found):
            name = f"{entry.pod_namespace}/{entry.pod_name} {entry.ifname}"
            refused.append(f"{name}: {found[0].said}")
    if refused:
        count = "1 attachment" if len(refused) == 1 else f"{len(refused)} attachments"
        more = f"; and {len(refused) - _TOLD} more" if len(refused) > _TOLD else ""
        yield warning(
            printable(f"{count} would be refused now: {'; '.join(refused[:_TOLD])}{more}"),
            "pods that run keep what they have: change the rules, or delete the pods",
        )


def _listed(found: Sequence[Rule]) -> str:
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(rule.title for rule in found[:_SHOWN]) + more
