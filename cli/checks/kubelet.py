"""Checks of config.yaml, the policy, the kubelet, podfabric's checkpoint, and the agent."""

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from base.documents import DocumentError
from base.unix_socket import is_served
from cli.checks import Outcome, failed, not_applicable, ok, some, warning
from cni.spec.errors import CNIError
from deviceplugin import checkpoint as records
from deviceplugin.checkpoint import CheckpointDamaged
from deviceplugin.kubelet import records as kubelet
from deviceplugin.kubelet.records import KubeletUnreadable
from deviceplugin.ledger import YOUNG, age
from deviceplugin.pools import formats
from deviceplugin.pools.pool_config import ConfigError
from node.state import ThisNode
from policy import rules, stored_policies
from policy.document import Rule

_LOOK_AT_AGENT = (
    "look at the log of podfabric's pod of this node; without Kubernetes: "
    "`systemctl status podfabric-agent`"
)


def configuration(node: ThisNode) -> Iterator[Outcome]:
    from agent import settings

    path = node.config_file
    problems = list(settings.load(path).mistakes.values())
    shown = ""
    try:
        config = formats.load(path)
        named: list[tuple[str, str]] = [(pool.resource, pool.mode) for pool in config.pools]
        named += [(name, of.mode) for of in config.gpus for name in of.resources]
        shown = ", ".join(f"{name} ({mode})" for name, mode in named)
    except ConfigError as error:
        problems.append(str(error))
    for text in dict.fromkeys(problems):
        yield failed(
            text, "correct it: until then an agent keeps the last correct settings of that section"
        )
    if not problems:
        absent = "" if path.exists() else " does not exist, so the defaults apply"
        yield ok(f"{path}{absent}: {shown or 'no pool'}")


def rules_of_node(node: ThisNode) -> Iterator[Outcome]:
    """Check whether the section `policy` of config.yaml and the cluster's policies can be read."""
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
        yield not_applicable("config.yaml has no rules: its keys for all pods apply")


def pools(node: ThisNode) -> Iterator[Outcome]:
    if not node.pools:
        yield not_applicable("no pool is configured")
    for pool in node.pools:
        name = pool.config.resource
        if not pool.slots:
            left = Counter(pool.left.values())
            yield failed(
                f"{name} offers nothing: {_most(left) or 'the node has no HCA'}",
                "`podfabric devices` shows the reason for each HCA",
            )
            continue
        if pool.problem:
            yield warning(pool.problem, "see docs/use/devices.md")
        counts = f"{name}: {len(pool.slots)} ids of {len(pool.hcas)} HCAs"
        # An HCA that a pod holds through another pool is not a problem.
        busy = set(node.elsewhere[name].values())
        reasons = Counter(why for why in node.unfit[name].values() if why not in busy)
        if reasons:
            bad = failed if len(node.unfit[name]) == len(pool.slots) else warning
            yield bad(
                f"{counts}, {reasons.total()} unhealthy: {_most(reasons)}",
                "the reasons say what to do; `podfabric devices` shows those of each HCA",
            )
        elif not pool.problem:
            yield ok(counts)


def agent(node: ThisNode) -> Iterator[Outcome]:
    yield _answers(node.paths.agent_socket, _LOOK_AT_AGENT)


def registration_socket(node: ThisNode) -> Iterator[Outcome]:
    if not node.paths.device_plugins.is_dir():
        yield failed(
            f"{node.paths.device_plugins}: this directory does not exist",
            "does a kubelet run here, with another directory (--root-dir, k3s, microk8s)? Then set "
            "PODFABRIC_KUBELET for the agent",
        )
    else:
        yield _answers(node.paths.device_plugins / "kubelet.sock", "`systemctl status kubelet`")


def pod_resources(node: ThisNode) -> Iterator[Outcome]:
    """Check the kubelet's PodResources API, from which CNI plugins read a pod's devices."""
    try:
        rows = kubelet.from_pod_resources(node.paths)
    except KubeletUnreadable as error:
        yield failed(str(error), "until then CNI plugins read only the kubelet's checkpoint")
        return
    pods = {(row.namespace, row.name) for row in rows if row.ids}
    yield ok(f"{node.paths.pod_resources} answers: {len(pods)} pods hold devices")


def registered(node: ThisNode) -> Iterator[Outcome]:
    """Check that the kubelet has our resources, and only podfabric's device ids for our pools."""
    registered_ids = kubelet.registered(node.paths)
    if not registered_ids:
        yield not_applicable("the kubelet has no resource in its checkpoint")
        return
    for name in (name for of in node.config.gpus for name in of.resources):
        if name in registered_ids:
            yield ok(f"{name}: the kubelet has {len(registered_ids[name])} ids as healthy")
        else:
            yield failed(f"{name}: the kubelet does not have it", _LOOK_AT_AGENT)
    for pool in node.pools:
        name = pool.config.resource
        foreign = [
            device_id for device_id in registered_ids.get(name, ()) if pool.slot(device_id) is None
        ]
        if foreign:
            yield failed(
                f"{name}: the kubelet has ids that are not podfabric's: {some(foreign)}: another "
                "device plugin offers that resource, or an earlier configuration did",
                "remove the other plugin (`kubectl get ds -A`), or rename the pool; then "
                "restart the agent",
            )
        elif name not in registered_ids and pool.slots:
            yield failed(f"{name}: the kubelet does not have it", _LOOK_AT_AGENT)
        else:
            healthy = len(registered_ids.get(name, ()))
            yield ok(f"{name}: the kubelet has {healthy} of our {len(pool.slots)} ids as healthy")


def checkpoint(node: ThisNode) -> Iterator[Outcome]:
    """Compare podfabric's checkpoint with the kubelet's checkpoint and PodResources API."""
    path = node.paths.checkpoint
    try:
        allocations = {
            allocation.key: allocation for allocation in records.read(node.paths).allocations
        }
    except CheckpointDamaged as damage:
        yield failed(
            str(damage), "restart the agent: it moves the file away and reads the kubelet's records"
        )
        return
    rows, problems = node.kubelet_rows
    ours = {pool.config.resource for pool in node.pools}
    ours.update(name for of in node.config.gpus for name in of.resources)
    theirs = {
        (row.resource, device_id) for row in rows for device_id in row.ids if row.resource in ours
    }
    missing = sorted(theirs - allocations.keys())
    if missing:
        yield failed(
            f"{path} lacks allocations that the kubelet has: {some(_shown(missing))}",
            f"a running agent adds them within a minute: {_LOOK_AT_AGENT}",
        )
    if problems:
        yield warning(
            f"{path} has {len(allocations)} allocations, not compared with the kubelet: "
            f"{'; '.join(problems)}",
            "see what the other checks say about the kubelet",
        )
        return
    now, boot_id = datetime.now(UTC), node.paths.boot_id()
    stale = sorted(
        key
        for key, allocation in allocations.items()
        if key not in theirs and age(allocation, boot_id, now) > YOUNG
    )
    if stale:
        yield warning(
            f"{path} has allocations that the kubelet does not have: {some(_shown(stale))}",
            f"a running agent drops them within a minute: {_LOOK_AT_AGENT}",
        )
    if not stale and not missing:
        yield ok(f"{path} and the kubelet agree on {len(theirs)} allocations")


def _answers(path: Path, remedy: str) -> Outcome:
    if is_served(path):
        return ok(f"{path} answers")
    return failed(
        f"{path}: {'no process answers' if path.exists() else 'it does not exist'}", remedy
    )


def _most(reasons: Counter[str]) -> str:
    return "; ".join(f"{why} ({count}x)" for why, count in reasons.most_common(3))


def _shown(keys: list[records.AllocationKey]) -> list[str]:
    return [f"{resource} {device_id}" for resource, device_id in keys]


def _listed(found: Sequence[Rule]) -> str:
    return some([rule.title for rule in found], most=20)
