"""The orders of the pods of `podfabric check`, their reports, and what the reports say.

A pod tests the next pods of its network in a ring, so each pod is also tested. A pod also calls
pods of the other network, which must not answer.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle, islice

import msgspec

from cli import output
from cli.output import Table

VARIABLE = "FABRIC_CHECK_ORDERS"  # of a pod, with its orders in JSON
SECONDS = 80.0  # the longest time of a pod's tests
MOST_PEERS = 8
MOST_WHY = 1200  # characters of all reasons; the kubelet reads 4096 bytes of a report

START, ADDRESS, MTU = "start", "address", "mtu"
PKEY, VERBS, ISOLATION = "pkey", "verbs", "isolation"
OK = "ok"
MOST_COLUMNS = 16  # nodes; more do not fit on a screen
REMEDIES = {
    START: "see `kubectl get events` in the namespace of the pods",
    ADDRESS: "compare P_Key or VLAN, and range: `podfabric explain` on both nodes, the switch",
    MTU: "set the same MTU in the definition, on the ports and on the switch",
    VERBS: "see `podfabric doctor` on both nodes: port state, GIDs, locked memory",
    PKEY: "let the subnet manager give the port this P_Key (`podfabric devices`)",
    ISOLATION: "give the networks different P_Keys or VLANs, and check routes between them",
}


class Rail(msgspec.Struct, frozen=True):
    """An interface of a pod on the tested network. Only a report has the last three fields."""

    interface: str
    address: str
    mac: str = ""
    mtu: int = 0
    pkey: str = ""  # "" for Ethernet
    device: str = ""  # "" without an HCA


Rails = tuple[Rail, ...]


class Orders(msgspec.Struct, frozen=True):
    """The tasks of a pod. As many pods as are in `peers` test this pod.

    `peers` and `foreign` have the interfaces of other pods, by pod. `foreign` pods must not answer.
    """

    run: str
    pod: str
    rails: Rails
    peers: dict[str, Rails] = {}
    foreign: dict[str, Rails] = {}
    verbs: bool = False
    seconds: float = SECONDS


class PodReport(msgspec.Struct, frozen=True):
    """`failed` has the first failed test with each other pod, and the reason."""

    rails: Rails
    failed: dict[str, tuple[str, str]] = {}


def orders(
    run: str, rings: Sequence[Mapping[str, Rails]], peers: int, *, verbs: bool
) -> Iterator[Orders]:
    """The orders of the pods of one network, or of two networks that must be separate."""
    for number, ring in enumerate(rings):
        others = rings[1 - number] if len(rings) == 2 else {}
        most = min(peers, len(ring) - 1)  # a pod does not test itself
        for place, (pod, rails) in enumerate(ring.items()):
            near = islice(cycle(ring.items()), place + 1, place + 1 + most)
            foreign = islice(cycle(others.items()), place, place + peers)
            yield Orders(run, pod, rails, dict(near), dict(foreign), verbs)


class Member(msgspec.Struct):
    """A pod of the run. `why` says why it has no report."""

    pod: str
    node: str
    network: str
    why: str = ""
    report: PodReport | None = None


class FabricTest(msgspec.Struct, frozen=True):
    """A pod's result with a pod on the node `target`, or its own result if `target` is "".

    `result` is OK or the first test that failed. `apart`: the two networks must be separate.
    """

    network: str
    source: str
    target: str
    apart: bool
    result: str
    cause: str
    remedy: str


def judged(members: Mapping[str, Member], given: Iterable[Orders]) -> Iterator[FabricTest]:
    """Judge the reports of the pods. `members` is by pod. The tests that failed have a cause."""
    for member in members.values():
        if member.report is None:
            yield _test(member, None, START, member.why or "the pod has not started")
    for orders in given:
        source = members[orders.pod]
        if not orders.peers:
            yield _test(source, None, START, "there is no second pod to test")
        for pod in (*orders.peers, *orders.foreign):
            yield _test(source, members[pod], *_result(source, members[pod]))


def _test(source: Member, target: Member | None, result: str, cause: str) -> FabricTest:
    apart = target is not None and source.network != target.network
    shown = f"{target.node} ({target.network})" if target and apart else target and target.node
    remedy = REMEDIES.get(result, "") if cause else ""
    return FabricTest(source.network, source.node, shown or "", apart, result, cause, remedy)


def _result(source: Member, target: Member) -> tuple[str, str]:
    """The first failed test and the cause. A pod without report is a failure of its own."""
    if source.report is None or target.report is None:
        return START, ""
    own, there = ([rail.pkey for rail in it.report.rails] for it in (source, target) if it.report)
    if source.network == target.network and own != there:
        return PKEY, f"the P_Keys are {' '.join(own)} here, {' '.join(there)} there"
    return source.report.failed.get(target.pod, (OK, ""))


def show(members: Sequence[Member], tests: Sequence[FabricTest]) -> None:
    """Print a matrix of each network, the pairs that must be separate, and the failures."""
    parts: list[Table | list[str]] = []
    for network in dict.fromkeys(each.network for each in members):
        pods = [each for each in members if each.network == network]
        pairs = [it for it in tests if it.network == network and it.target and not it.apart]
        parts += [[f"{network}: {len(pods)} pods, {len(pairs)} pairs"], _matrix(pods, pairs)]
    if apart := [it.result for it in tests if it.apart]:
        number = apart.count(OK)
        parts.append([f"pairs of the two networks: {len(apart)}, proved separate: {number}"])
    failed = [it for it in tests if it.cause]
    for it in failed:
        way = f"{it.source} to {it.target}" if it.target else it.source
        parts.append([f"FAILED {it.result}: {way}: {it.cause}", f"  {it.remedy}"])
    output.show(*parts, f"failures: {len(failed)}" if failed else "all tests passed")


def _matrix(pods: Sequence[Member], pairs: Sequence[FabricTest]) -> Table:
    """The results, if the nodes fit on a screen, and the interfaces."""
    names = [each.node for each in pods] if len(pods) <= MOST_COLUMNS else []
    results = {(it.source, it.target): it.result for it in pairs}
    rows = []
    for each in pods:
        rails = each.report.rails if each.report else ()
        seen = [f"{it.interface} {it.address} {it.mtu} {it.pkey}".strip() for it in rails]
        rows.append([each.node, seen, *(results.get((each.node, name), "") for name in names)])
    return Table(("FROM", "ADDRESS MTU P_KEY", *names), rows)
