"""Table J: the remains of a failed ADD."""

import signal
import time
from pathlib import Path

import pytest

from tests.conformance.expect import ADDED, OK, Err
from tests.conformance.node import Delegate, Node, encoded
from tests.conformance.rows import row
from tests.conformance.subject import FIRST, IPAM, IPOIB, NOOP, Subject
from tests.netns import ip
from tests.waiting import PATIENCE, until

SMALLEST = {"type": "podfabric-ipam", "range": "10.9.0.0/30"}  # two addresses


@row("J2", by=[IPAM])
def test_exhausted_pool_gives_the_same_error_again(node: Node, subject: Subject) -> None:
    config = subject.config(ipam=SMALLEST)
    for container_id in ("c1", "c2"):
        ADDED.met_by(node.call(subject, config=config, CNI_CONTAINERID=container_id))
    first = node.call(subject, config=config, CNI_CONTAINERID="c3")
    Err(110, contains="10.9.0.0/30").met_by(first)
    assert node.call(subject, config=config, CNI_CONTAINERID="c3").document == first.document
    OK.met_by(node.call(subject, "DEL", config))
    assert node.call(subject, config=config, CNI_CONTAINERID="c3").exit_code == 0


@row("J2", by=[IPAM])
def test_exhausted_second_range_reserves_nothing_of_the_first(node: Node, subject: Subject) -> None:
    ranges = [{"range": "10.9.0.0/24"}, {"range": "10.9.1.0/30", "exclude": ["10.9.1.0/30"]}]
    config = subject.config(ipam={"type": "podfabric-ipam", "ipRanges": ranges})
    Err(110, contains="10.9.1.").met_by(node.call(subject, config=config))
    assert node.call(subject, CNI_CONTAINERID="c2").addresses == [FIRST]


@row("J3", by=[NOOP])
def test_missing_delegate_is_named_with_the_path(node: Node, subject: Subject) -> None:
    outcome = node.call(subject, config=subject.config(ipam={"type": "x"}))
    Err(7, contains=f'failed to find plugin "x" in path [{node.delegates}]').met_by(outcome)


@pytest.mark.parametrize("answer", ["garbage", "", "[]", '{"ips":[{"address":"10.9.0.7"}]}'])
@row("J4", by=[NOOP])
def test_delegate_that_answers_garbage_is_undone(
    node: Node, delegate: Delegate, subject: Subject, answer: str
) -> None:
    delegate.answer("ADD", answer)
    outcome = node.call(subject, config=subject.config(ipam={"type": delegate.name}))
    Err(6).met_by(outcome)
    assert delegate.commands == ["ADD", "DEL"]


BAD_KEYS: list[tuple[str, object]] = [
    ("mode", "bridge"),
    ("mac", "02:00:00:00:00:01"),
    ("mtu", 10),
    ("mtu", 70000),
    ("pkey", "0x12345"),
    ("master", ["none0", "none1"]),
    ("master", "lo"),
]


@pytest.mark.parametrize(("key", "value"), BAD_KEYS, ids=[f"{k}={v}" for k, v in BAD_KEYS])
@row("J8", by=[IPOIB])
def test_value_that_cannot_work_is_an_error_and_nothing_is_made(
    node: Node, netns: Path, subject: Subject, key: str, value: object
) -> None:
    links = ip("-brief", "link")
    config = subject.config(**{"master": "none0", key: value, "ipam": IPAM.keys["ipam"]})
    outcome = node.call(subject, config=config, CNI_NETNS=str(netns))
    named = "parent" if key == "master" else key
    Err(7, contains=named).met_by(outcome)
    assert node.untouched()
    assert ip("-brief", "link") == links
    assert ip("-netns", netns.name, "-brief", "link").split()[0] == "lo"


@row("J8", by=[IPOIB])
def test_pod_without_an_hca_does_not_get_one_from_auto(
    node: Node, netns: Path, subject: Subject
) -> None:
    links = ip("-brief", "link")
    config = subject.config(master="auto", ipam=IPAM.keys["ipam"])
    outcome = node.call(subject, config=config, CNI_NETNS=str(netns))
    Err(120, contains="was given no HCA").met_by(outcome)
    assert node.untouched()
    assert ip("-brief", "link") == links


@row("J8", by=[IPAM])
def test_range_that_cannot_work_is_an_error_and_nothing_is_reserved(
    node: Node, subject: Subject
) -> None:
    for ipam in (
        {"range": "10.9.0.0"},
        {"range": "10.9.0.0/24", "range_start": "10.9.1.1"},
        {"range": "10.9.0.0/24", "range_start": "10.9.0.9", "range_end": "10.9.0.3"},
        {},
    ):
        config = subject.config(ipam={"type": "podfabric-ipam", **ipam})
        Err(7, contains="range").met_by(node.call(subject, config=config))
        assert node.untouched()


@pytest.mark.parametrize("after", [0.02, 0.04, 0.05, 0.06, 0.07, 0.08, 0.1, 0.15])
@row("J9", by=[IPAM])
def test_killed_add_leaves_nothing_after_del(node: Node, subject: Subject, after: float) -> None:
    """The kill may hit any step; tests/unit/ipam kills at every single step."""
    with node.start(subject) as process:
        assert process.stdin is not None
        process.stdin.write(encoded(subject.config()))
        process.stdin.close()
        time.sleep(after)
        process.kill()
    OK.met_by(node.call(subject, "DEL"))
    assert node.call(subject, CNI_CONTAINERID="c2").addresses == [FIRST]


@row("J10", by=[NOOP])
def test_terminated_add_is_undone(node: Node, delegate: Delegate, subject: Subject) -> None:
    delegate.answer("ADD", sleep=600)
    config = subject.config(ipam={"type": delegate.name})
    with node.start(subject) as process:
        assert process.stdin is not None
        process.stdin.write(encoded(config))
        process.stdin.close()
        process.stdin = None
        until(lambda: delegate.commands)
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=PATIENCE)
    if node.through_agent:  # a launcher just ends, and the agent notices
        assert (process.returncode, stdout) == (-signal.SIGTERM, b"")
        until(lambda: len(delegate.commands) == 2)
    else:
        assert process.returncode == 1
        assert b'"code":11' in stdout, stderr
    assert delegate.commands == ["ADD", "DEL"]
    until(lambda: not node.processes())


@pytest.mark.parametrize(
    "ipam",
    [{}, {"range_start": "10.9.0.1", "range_end": "10.9.0.1"}],
    ids=["any", "only"],
)
@row("J11", by=[IPAM])
def test_second_add_of_a_live_attachment_is_an_error_and_takes_nothing_away(
    node: Node, subject: Subject, ipam: dict[str, str]
) -> None:
    config = subject.config(ipam={**subject.keys["ipam"], **ipam})
    assert node.call(subject, config=config).addresses == [FIRST]
    Err(103, contains="10.9.0.1").met_by(node.call(subject, config=config))
    other = node.call(subject, config=config, CNI_CONTAINERID="c2")
    assert other.exit_code == 1 if ipam else other.addresses == ["10.9.0.2/24"]


@row("J11", by=[IPAM])
def test_second_add_with_requested_addresses_is_an_error_and_takes_nothing_away(
    node: Node, subject: Subject
) -> None:
    args = "IgnoreUnknown=1;IP=10.9.0.7"
    assert node.call(subject, CNI_ARGS=args).addresses == ["10.9.0.7/24"]
    Err(103, contains="10.9.0.7").met_by(node.call(subject, CNI_ARGS=args))
    Err(111, contains="10.9.0.7").met_by(node.call(subject, CNI_ARGS=args, CNI_CONTAINERID="c2"))
