"""Table F: the network namespace."""

from pathlib import Path

import pytest

from tests.conformance.expect import ADDED, OK, Err, NotCode
from tests.conformance.node import Node, inhabitants
from tests.conformance.rows import row, variants
from tests.conformance.subject import ADDING, FIRST, IPAM, IPOIB, OURS, Subject
from tests.netns import NETNS, namespace

OWN = "/proc/self/ns/net"
SAME = Err(8, "plugin's netns and netns from CNI_NETNS should not be the same")
WITH_IPAM = {"ipam": IPAM.keys["ipam"]}


@row("F1")
def test_add_to_the_own_namespace_is_refused_before_anything_is_done(
    node: Node, subject: Subject
) -> None:
    SAME.met_by(node.call(subject, CNI_NETNS=OWN))
    assert node.untouched()


@row("F2")
def test_del_in_the_own_namespace_is_refused(node: Node, subject: Subject) -> None:
    SAME.met_by(node.call(subject, "DEL", CNI_NETNS=OWN))
    assert node.untouched()


@variants("value", "F3", ["1", "true", "TrUe"])
@row("F3", by=ADDING)
def test_own_namespace_may_be_allowed(node: Node, subject: Subject, value: str) -> None:
    ADDED.met_by(node.call(subject, CNI_NETNS=OWN, CNI_NETNS_OVERRIDE=value))


@row("F3", by=[IPOIB])
def test_override_lets_the_call_fail_for_another_reason(node: Node, subject: Subject) -> None:
    config = subject.config(master="none0")
    NotCode(8).met_by(node.call(subject, config=config, CNI_NETNS=OWN, CNI_NETNS_OVERRIDE="1"))


@row("F4")
def test_override_is_1_or_true_only(node: Node, subject: Subject) -> None:
    SAME.met_by(node.call(subject, CNI_NETNS=OWN, CNI_NETNS_OVERRIDE="yes"))


@row("F5", by=[IPOIB])
def test_add_to_a_namespace_that_does_not_exist_reserves_nothing(
    node: Node, subject: Subject
) -> None:
    config = subject.config(**WITH_IPAM)
    path = str(NETNS / "none")
    Err(100, contains="failed to open netns").met_by(
        node.call(subject, config=config, CNI_NETNS=path)
    )
    assert node.untouched()


@row("F6", by=[IPOIB])
def test_add_to_a_plain_file_is_an_error(node: Node, subject: Subject) -> None:
    config = subject.config(**WITH_IPAM)
    outcome = node.call(subject, config=config, CNI_NETNS="/etc/passwd")
    Err(100, contains=("failed to open netns", "unknown FS magic")).met_by(outcome)
    assert node.untouched()


@row("F7", by=OURS)
def test_del_with_a_path_that_is_gone_succeeds_and_does_not_create_it(
    node: Node, subject: Subject
) -> None:
    path = NETNS / "none"
    OK.met_by(node.call(subject, "DEL", CNI_NETNS=str(path)))
    assert not path.exists()


@row("F8", by=OURS)
def test_del_with_a_plain_file_at_the_path_succeeds(
    node: Node, tmp_path: Path, subject: Subject
) -> None:
    left_over = tmp_path / "was-a-mount-point"
    left_over.touch()
    OK.met_by(node.call(subject, "DEL", CNI_NETNS=str(left_over)))
    assert left_over.exists()


@pytest.mark.parametrize("path", ["/var/run/netns/none", "/etc/passwd"])
@row("F7+F8", by=[IPAM])
def test_del_with_a_dead_namespace_releases_the_address(
    node: Node, subject: Subject, path: str
) -> None:
    assert node.call(subject).addresses == [FIRST]
    OK.met_by(node.call(subject, "DEL", CNI_NETNS=path))
    assert node.call(subject, CNI_CONTAINERID="c2").addresses == [FIRST]


@row("F9")
def test_relative_path_goes_from_the_current_directory(node: Node, subject: Subject) -> None:
    environ = node.environ(CNI_NETNS="proc/self/ns/net")
    SAME.met_by(node.run(subject, environ, cwd=Path("/")))


@row("F9", by=[IPOIB])
def test_relative_path_is_never_another_namespace(
    node: Node, netns: Path, subject: Subject
) -> None:
    environ = node.environ(CNI_NETNS=netns.name)
    config = subject.config(master="none0")
    Err(7, contains='"none0"').met_by(node.run(subject, environ, config, cwd=NETNS))
    Err(100, contains="failed to open netns").met_by(
        node.run(subject, environ, config, cwd=Path("/"))
    )


@row("F10", by=ADDING)
def test_no_process_stays_in_the_namespace(node: Node, netns: Path, subject: Subject) -> None:
    for command in ("ADD", "DEL"):
        assert node.call(subject, command, CNI_NETNS=str(netns)).exit_code == 0
    assert inhabitants(netns) == []


@row("F10", by=[IPOIB])
def test_failed_add_leaves_no_process_in_the_namespace(
    node: Node, netns: Path, subject: Subject
) -> None:
    config = subject.config(master="none0")
    assert node.call(subject, config=config, CNI_NETNS=str(netns)).exit_code == 1
    assert inhabitants(netns) == []


def test_namespace_of_a_test_is_removed() -> None:
    with namespace() as path:
        assert path.exists()
    assert not path.exists()
