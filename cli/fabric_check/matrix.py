"""The results of `podfabric check`: a matrix, and the failures with causes and remedies."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from cli import output
from cli.fabric_check import ring
from cli.fabric_check.ring import Orders, PodReport, RailFacts
from cli.output import Cell, Table
from host.sysfs.infiniband import FULL_MEMBER

OK = "ok"
_MOST_COLUMNS = 16  # nodes; more do not fit on a screen
REMEDIES = {
    ring.START: "see `kubectl describe` of a pod with this definition, and `podfabric explain`",
    ring.ADDRESS: "compare P_Key or VLAN, and range: `podfabric explain` on both nodes, the switch",
    ring.MTU: "set the same MTU in the definition, on the ports and on the switch",
    ring.VERBS: "see `podfabric doctor` on both nodes: port state, GIDs, locked memory",
    ring.PKEY: "let the subnet manager give the port this P_Key (`podfabric devices`)",
    ring.ISOLATION: "give the networks different P_Keys or VLANs, and check routes between them",
}


class Member(msgspec.Struct, frozen=True):
    """A pod of the run. `why` says why it has no report."""

    pod: str
    node: str
    network: str
    why: str = ""
    report: PodReport | None = None


class TestedPair(msgspec.Struct, frozen=True):
    """`result` is OK or the first test that failed. `apart`: the two networks must be separate."""

    network: str
    source: str
    target: str
    apart: bool
    result: str


class TestFailure(msgspec.Struct, frozen=True):
    """`target` is "" if the source itself is at fault."""

    network: str
    source: str
    target: str
    test: str
    cause: str
    remedy: str


class FabricVerdict(msgspec.Struct, frozen=True):
    ok: bool
    pods: tuple[Member, ...]
    pairs: tuple[TestedPair, ...]
    failures: tuple[TestFailure, ...]


def verdict(members: Mapping[str, Member], given: Sequence[Orders]) -> FabricVerdict:
    """Judge the reports of the pods. `members` is by pod."""
    failures = [
        _failure(each, "", ring.START, each.why or "the pod wrote no report")
        for each in members.values()
        if each.report is None
    ]
    for orders in given:
        failures += _failures(members, orders)
    failed = {(it.network, it.source, it.target): it.test for it in reversed(failures)}
    pairs = []
    for orders in given:
        source = members[orders.pod]
        for other in (*orders.peers, *orders.foreign):
            target, name = members[other.pod], _name(source, members[other.pod])
            result = failed.get((source.network, source.node, name), OK)
            if source.report is None or target.report is None:
                result = ring.START
            apart = source.network != target.network
            pairs.append(TestedPair(source.network, source.node, name, apart, result))
    for network in {each.network for each in members.values()} if not failures else ():
        if not any(each.network == network and not each.apart for each in pairs):
            first = next(each for each in members.values() if each.network == network)
            failures.append(_failure(first, "", ring.START, "there is no second pod to test"))
    return FabricVerdict(not failures, tuple(members.values()), tuple(pairs), tuple(failures))


def _failure(source: Member, target: str, test: str, cause: str) -> TestFailure:
    remedy = REMEDIES.get(test, REMEDIES[ring.START])
    return TestFailure(source.network, source.node, target, test, cause, remedy)


def _name(source: Member, target: Member) -> str:
    """The target's node, with the network if it is the other one."""
    return target.node + (f" ({target.network})" if target.network != source.network else "")


def _failures(members: Mapping[str, Member], orders: Orders) -> Iterator[TestFailure]:
    source = members[orders.pod]
    if source.report is None:
        return
    for found in source.report.failed:
        other = members.get(found.pod, source)
        target = _name(source, other) if other is not source else ""
        yield _failure(source, target, found.test, found.why)
    if source.report.more:
        yield _failure(source, "", ring.START, f"{source.report.more} more tests failed")
    for peer in orders.peers:
        there = members[peer.pod].report
        for test, cause in _differences(source.report.rails, there.rails) if there else ():
            yield _failure(source, _name(source, members[peer.pod]), test, cause)


def _differences(own: Sequence[RailFacts], there: Sequence[RailFacts]) -> Iterator[tuple[str, str]]:
    if len(own) != len(there):
        yield ring.ADDRESS, f"{len(own)} interfaces here, {len(there)} there"
    for one, other in zip(own, there, strict=False):
        if one.mtu != other.mtu:
            yield ring.MTU, f"the MTU of {one.interface} is {one.mtu} here, {other.mtu} there"
        if _partition(one) != _partition(other):
            yield ring.PKEY, f"the P_Key is {one.pkey or 'none'} here, {other.pkey or 'none'} there"


def _partition(facts: RailFacts) -> int | None:
    try:
        return int(facts.pkey, 16) & ~FULL_MEMBER
    except ValueError:
        return None


def show(found: FabricVerdict) -> None:
    """Print a matrix of each network, the pairs that must be separate, and the failures."""
    parts: list[Table | list[str]] = []
    for network in dict.fromkeys(each.network for each in found.pods):
        members = [each for each in found.pods if each.network == network]
        pairs = [it for it in found.pairs if it.network == network and not it.apart]
        parts += [[f"{network}: {len(members)} pods, {len(pairs)} pairs"], _matrix(members, pairs)]
    if apart := [it for it in found.pairs if it.apart]:
        number = sum(each.result == OK for each in apart)
        parts.append([f"pairs of the two networks: {len(apart)}, proved separate: {number}"])
    for each in found.failures:
        way = f"{each.source} to {each.target}" if each.target else each.source
        parts.append([f"FAILED {each.test}: {way}: {each.cause}", f"  {each.remedy}"])
    output.show(*parts, "all tests passed" if found.ok else f"failures: {len(found.failures)}")


def _matrix(members: Sequence[Member], pairs: Sequence[TestedPair]) -> Table:
    names = [each.node for each in members]
    is_wide = len(names) > _MOST_COLUMNS
    rows: list[list[Cell]] = []
    for each in members:
        tested = {it.target: it.result for it in pairs if it.source == each.node}
        facts = each.report.rails if each.report else ()
        seen = [f"{it.interface} {it.address} {it.mtu} {it.pkey}".strip() for it in facts]
        cells = [Cell(tested.get(name, "")) for name in names]
        if is_wide:
            cells = [Cell([f"{name}: {result}" for name, result in tested.items()])]
        rows.append([Cell(each.node), Cell(seen), *cells])
    return Table(("FROM", "ADDRESS MTU P_KEY", *(["TO"] if is_wide else names)), rows)
