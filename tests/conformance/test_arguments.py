"""Table L: CNI_ARGS for the plugins that read them."""

from tests.conformance.expect import ADDED, Err, Expected, NotCode
from tests.conformance.node import Node
from tests.conformance.rows import Case, row, table
from tests.conformance.subject import FIRST, IPAM, IPOIB, OURS, Subject

CRI = (
    "K8S_POD_NAMESPACE=default",
    "K8S_POD_NAME=p-0",
    "K8S_POD_INFRA_CONTAINER_ID=0123abcd",
    "K8S_POD_UID=8a5f0f3c-7d3b-4a3e-9a55-2a4c1c7f3a10",
)
NO_PARENT = {"master": "none0"}


def args_case(row_name: str, args: str | None, expected: Err, note: str = "") -> Case:
    """An error of both plugins."""
    return Case(row_name, expected, {"CNI_ARGS": args}, by=OURS, note=note)


def accepted(row_name: str, args: str | None, note: str = "") -> list[Case]:
    """IPAM succeeds; the interface plugin fails later, because the namespace does not exist."""
    environ = {"CNI_ARGS": args}
    expected: Expected = NotCode(4)
    return [
        Case(row_name, ADDED, environ, by=[IPAM], note=note),
        Case(row_name, expected, environ, NO_PARENT, by=[IPOIB], note=note),
    ]


CASES = [
    *accepted("L1", "", "empty"),
    *accepted("L1", None, "unset"),
    args_case("L2", "FOO=BAR", Err(4, 'ARGS: unknown args ["FOO=BAR"]')),
    *accepted("L3", "IgnoreUnknown=1;FOO=BAR", "first"),
    *accepted("L3", "FOO=BAR;IgnoreUnknown=TRUE", "last"),
    args_case("L3", "IgnoreUnknown=0;FOO=BAR", Err(4, contains="unknown args"), "zero"),
    args_case("L3", "FOO=BAR;IgnoreUnknown=False", Err(4, contains="unknown args"), "false"),
    args_case(
        "L4",
        "IgnoreUnknown=yes;FOO=BAR",
        Err(4, contains="boolean unmarshal error: invalid input yes"),
    ),
    args_case("L5", "IgnoreUnknown=1;", Err(4, 'ARGS: invalid pair ""')),
    args_case("L6", "A=B=C;IgnoreUnknown=1", Err(4, 'ARGS: invalid pair "A=B=C"')),
    *accepted("L10", ";".join(("IgnoreUnknown=1", *CRI)), "first"),
    *accepted("L10", ";".join((*reversed(CRI), "IgnoreUnknown=1")), "last"),
]


@table(CASES)
def test_arguments(node: Node, case: Case, subject: Subject) -> None:
    outcome = node.run(subject, node.environ(**case.environ), case.stdin(subject))
    case.expected.met_by(outcome)
    if isinstance(case.expected, Err):
        assert node.untouched()


@row("L7", by=[IPAM])
def test_keys_are_case_sensitive(node: Node, subject: Subject) -> None:
    outcome = node.call(subject, CNI_ARGS="IgnoreUnknown=1;ip=10.9.0.9")
    assert outcome.addresses == [FIRST]


@row("L8", by=[IPOIB])
def test_hardware_address_cannot_be_asked_for(node: Node, subject: Subject) -> None:
    """Deliberate: the kernel derives it from the port's GUID and the queue pair's number."""
    outcome = node.call(subject, CNI_ARGS="IgnoreUnknown=1;MAC=c2:11:22:33:44:55")
    Err(4, contains="MAC").met_by(outcome)


@row("L9", by=[IPAM])
def test_several_addresses_may_be_asked_for(node: Node, subject: Subject) -> None:
    """With prefixes and a comma, as Multus joins them."""
    ranges = [{"range": "10.9.0.0/24"}, {"range": "fd00:9::/64"}]
    config = subject.config(ipam={"type": "podfabric-ipam", "ipRanges": ranges})
    args = "IgnoreUnknown=1;IP=10.9.0.9/24,fd00:9::9/64"
    outcome = node.call(subject, config=config, CNI_ARGS=args)
    assert outcome.addresses == ["10.9.0.9/24", "fd00:9::9/64"]
