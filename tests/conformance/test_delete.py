"""Table I: DEL."""

import subprocess
from pathlib import Path

import pytest

from tests.conformance.expect import ADDED, OK, Err
from tests.conformance.node import Delegate, Node, encoded
from tests.conformance.rows import row
from tests.conformance.subject import ADDING, FIRST, IPAM, IPOIB, NOOP, OURS, Subject
from tests.netns import ip
from tests.waiting import PATIENCE

PHRASES = ("not found", "no such file or directory")  # go-cni treats these as success


@row("I1+I10")
def test_del_without_add_succeeds_and_prints_nothing(node: Node, subject: Subject) -> None:
    OK.met_by(node.call(subject, "DEL"))


@row("I2+I10", by=ADDING)
def test_second_del_succeeds(node: Node, subject: Subject) -> None:
    ADDED.met_by(node.call(subject))
    for _ in range(2):
        OK.met_by(node.call(subject, "DEL"))


@row("I3", by=[IPAM])
def test_del_after_the_namespace_has_gone_frees_the_address(
    node: Node, netns: Path, subject: Subject
) -> None:
    assert node.call(subject, CNI_NETNS=str(netns)).addresses == [FIRST]
    ip("netns", "delete", netns.name)
    OK.met_by(node.call(subject, "DEL", CNI_NETNS=str(netns)))
    assert not netns.exists()
    assert node.call(subject, CNI_CONTAINERID="c2").addresses == [FIRST]


@pytest.mark.parametrize("path", [None, ""], ids=["unset", "empty"])
@row("I4", by=[IPAM])
def test_del_without_a_namespace_frees_the_address(
    node: Node, subject: Subject, path: str | None
) -> None:
    assert node.call(subject).addresses == [FIRST]
    OK.met_by(node.call(subject, "DEL", CNI_NETNS=path))
    assert node.call(subject, CNI_CONTAINERID="c2").addresses == [FIRST]


@row("I8", by=[IPAM])
def test_del_leaves_other_interfaces_of_the_container_alone(node: Node, subject: Subject) -> None:
    assert node.call(subject, CNI_IFNAME="eth0").addresses == [FIRST]
    ADDED.met_by(node.call(subject, CNI_IFNAME="eth1"))
    OK.met_by(node.call(subject, "DEL", CNI_IFNAME="eth1"))
    Err(103, contains="10.9.0.1").met_by(node.call(subject, CNI_IFNAME="eth0"))


@row("I9", by=OURS)
def test_del_with_keys_missing_does_not_crash(node: Node, subject: Subject) -> None:
    """Deliberate: only the attachment decides what DEL removes, so it succeeds."""
    for config in (
        subject.config(ipam=None),
        subject.config(master=None, ipam={}),
        subject.config(ipam=[], master=5),
        {"cniVersion": "1.0.0", "name": "n1"},
    ):
        OK.met_by(node.call(subject, "DEL", config))


@row("I9", by=[IPAM])
def test_del_without_the_ipam_key_frees_the_address(node: Node, subject: Subject) -> None:
    assert node.call(subject).addresses == [FIRST]
    OK.met_by(node.call(subject, "DEL", subject.config(ipam=None)))
    assert node.call(subject, CNI_CONTAINERID="c2").addresses == [FIRST]


@row("I11", by=[NOOP, IPOIB])
def test_failure_of_the_delegate_is_passed_up(
    node: Node, delegate: Delegate, subject: Subject
) -> None:
    delegate.fail("DEL", 11, "store is busy")
    config = subject.config(ipam={"type": delegate.name})
    outcome = node.call(subject, "DEL", config)
    Err((11, 104), contains="store is busy").met_by(outcome)


@row("I12", by=OURS)
def test_parallel_dels_of_one_attachment_all_succeed(node: Node, subject: Subject) -> None:
    if subject.adds:
        ADDED.met_by(node.call(subject))
    started = [node.start(subject, node.environ(CNI_COMMAND="DEL")) for _ in range(20)]
    for process in started:
        assert process.stdin is not None
        process.stdin.write(encoded(subject.config()))
        process.stdin.close()
        process.stdin = None
    outcomes = [finished(process) for process in started]
    assert outcomes == [(0, b"")] * 20


def finished(process: "subprocess.Popen[bytes]") -> tuple[int, bytes]:
    with process:
        stdout, _ = process.communicate(timeout=PATIENCE)
    return process.returncode, stdout


@pytest.mark.parametrize("phrase", [*PHRASES, "No Such File Or Directory", "Link not found"])
@row("I13", by=[NOOP, IPOIB])
def test_failed_del_never_reads_like_a_success(
    node: Node, delegate: Delegate, subject: Subject, phrase: str
) -> None:
    delegate.answer("DEL", {"code": 100, "msg": f"/x: {phrase}", "details": phrase}, exit_code=1)
    config = subject.config(ipam={"type": delegate.name})
    document = node.call(subject, "DEL", config).document
    text = f"{document['msg']}; {document.get('details', '')}".lower()
    assert not any(phrase in text for phrase in PHRASES)


@row("I13", by=[NOOP])
def test_del_without_its_delegate_fails_and_does_not_read_like_a_success(
    node: Node, subject: Subject
) -> None:
    outcome = node.call(subject, "DEL", subject.config(ipam={"type": "nowhere"}))
    Err((7, 104), contains='"nowhere"').met_by(outcome)
    assert not any(phrase in outcome.document["msg"].lower() for phrase in PHRASES)


@row("I13", by=[IPOIB])
def test_del_without_its_delegate_succeeds_if_no_add_has_called_it(
    node: Node, subject: Subject
) -> None:
    node.allow(use={"ipamTypes": ["nowhere"]})
    outcome = node.call(subject, "DEL", subject.config(ipam={"type": "nowhere"}))
    OK.met_by(outcome)
    assert 'IPAM plugin "nowhere" was not called' in outcome.stderr


@row("I13", by=[IPAM])
def test_del_on_a_broken_store_fails_and_does_not_read_like_a_success(
    node: Node, subject: Subject
) -> None:
    """A file replaces the store's directory."""
    ADDED.met_by(node.call(subject))
    store = node.state / "ipam"
    store.rename(node.state / "aside")
    store.write_text("")
    outcome = node.call(subject, "DEL")
    assert outcome.exit_code == 1
    assert outcome.document["code"] in (5, 112)
    assert not any(phrase in outcome.document["msg"].lower() for phrase in PHRASES)
    store.unlink()
    (node.state / "aside").rename(store)
    OK.met_by(node.call(subject, "DEL"))
