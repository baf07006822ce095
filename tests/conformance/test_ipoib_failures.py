"""`ipoib` on real drivers: rows with a failure, and rows with another plugin."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.expect import OK, Err
from tests.conformance.fabric import (
    KEY,
    KNOBS,
    PARENT,
    WITNESS,
    add,
    delete,
    links,
    unchanged_host,
)
from tests.conformance.node import Delegate, Node, Outcome, encoded
from tests.conformance.rows import row
from tests.conformance.subject import IPOIB, Subject
from tests.netns import IP, ip
from tests.waiting import PATIENCE, until

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("no_strays")]


@row("J1", by=[IPOIB])
def test_interface_name_that_is_taken(
    node: Node, netns: Path, delegate: Delegate, subject: Subject
) -> None:
    ip("-netns", netns.name, "link", "add", "eth0", "type", "bridge")
    before = links(netns)
    with unchanged_host():
        config = subject.config(ipam={"type": delegate.name})
        outcome = node.call(subject, config=config, CNI_NETNS=str(netns))
        Err(7, contains='"eth0"').met_by(outcome)
    assert links(netns) == before
    assert delegate.commands == []


FAILING: list[tuple[str, str, tuple[int, ...], str]] = [
    ("J4", "garbage", (6,), ""),
    ("J5", '{"ips":[{"address":"ff02::5/64"}]}', (100,), "ff02::5"),
    ("J6", '{"cniVersion":"1.0.0"}', (101,), "IPAM plugin returned missing IP config"),
]


@pytest.mark.parametrize(
    ("answer", "codes", "message"),
    [pytest.param(*rest, id=name) for name, *rest in FAILING],
)
@row("J4", "J5", "J6", by=[IPOIB])
def test_delegate_is_undone_when_its_answer_is_unusable(
    node: Node,
    netns: Path,
    delegate: Delegate,
    subject: Subject,
    answer: str,
    codes: tuple[int, ...],
    message: str,
) -> None:
    delegate.answer("ADD", answer)
    with unchanged_host():
        config = subject.config(ipam={"type": delegate.name})
        outcome = node.call(subject, config=config, CNI_NETNS=str(netns))
        Err(codes, contains=message).met_by(outcome)
    assert list(links(netns)) == ["lo"]
    assert delegate.commands == ["ADD", "DEL"]


@row("J3", "E11", by=[IPOIB])
def test_missing_delegate(node: Node, netns: Path, subject: Subject) -> None:
    node.allow(use={"ipamTypes": ["nowhere"]})
    config = subject.config(cniVersion="1.1.0", ipam={"type": "nowhere"})
    with unchanged_host():
        outcome = node.call(subject, config=config, CNI_NETNS=str(netns))
        Err(7, contains='failed to find plugin "nowhere" in path [').met_by(outcome)
    assert list(links(netns)) == ["lo"]
    outcome = node.call(subject, "DEL", config, CNI_NETNS=str(netns))
    assert (outcome.exit_code, outcome.stdout) == (0, b"")
    outcome = node.call(subject, "STATUS", config)
    Err(50, contains='failed to find plugin "nowhere"').met_by(outcome)


@row("E3", "E6", "E8", "E9", by=[IPOIB])
def test_gc_removes_what_is_not_listed_and_goes_on_after_a_failure(
    node: Node, netns: Path, delegate: Delegate, subject: Subject
) -> None:
    config = subject.config(cniVersion="1.1.0", ipam={"type": delegate.name})
    of_another_network = {**config, "name": "n2"}

    def collect(valid: list[dict[str, str]] | None) -> Outcome:
        return node.call(subject, "GC", {**config, KEY: valid})

    with unchanged_host():
        for number in (1, 2, 3):
            delegate.answer("ADD", {"ips": [{"address": f"10.9.0.{number}/24"}]})
            environ = {"CNI_CONTAINERID": f"c{number}", "CNI_IFNAME": f"eth{number}"}
            add(node, netns, config, **environ)
        add(node, netns, of_another_network, CNI_CONTAINERID="c2", CNI_IFNAME="eth4")

        delegate.fail("DEL-c3", 100, "store is busy")
        outcome = collect([{"containerID": "c1", "ifname": "eth1"}])
        Err(104, contains=("c3", "store is busy")).met_by(outcome)
        assert {"eth1", "eth4"} <= set(links(netns))
        assert "eth2" not in links(netns)

        delegate.answer("DEL-c3")
        for _ in range(2):
            OK.met_by(collect([{"containerID": "c1", "ifname": "eth1"}]))
        assert set(links(netns)) == {"lo", "eth1", "eth4"}
        OK.met_by(collect(None))
        assert set(links(netns)) == {"lo", "eth4"}
        delete(node, netns, of_another_network, CNI_CONTAINERID="c2", CNI_IFNAME="eth4")


@row("H1", "H6", "H7", "K5", by=[IPOIB])
def test_previous_result_is_kept_and_ours_goes_behind_it(
    node: Node, netns: Path, subject: Subject
) -> None:
    """With an empty "ipam.type", which means an interface without addresses."""
    other = {"name": "net0", "sandbox": str(netns), "mtu": 1500, "socketPath": "/s", "future": 1}
    previous = {
        "cniVersion": "1.0.0",
        "interfaces": [other],
        "ips": [{"address": "10.1.2.3/24", "interface": 0}],
        "unknown": {"x": None},
    }
    config = subject.config(ipam={"type": ""}, prevResult=previous)
    with unchanged_host():
        result = add(node, netns, config)
        ours = result["interfaces"].pop()
        assert (ours["name"], ours["sandbox"]) == ("eth0", str(netns))
        assert result == previous
        delete(node, netns, config)


def started(node: Node, netns: Path, config: dict[str, Any]) -> "subprocess.Popen[bytes]":
    """An ADD in progress."""
    process = node.start(IPOIB, node.environ(CNI_NETNS=str(netns)))
    assert process.stdin is not None
    process.stdin.write(encoded(config))
    process.stdin.close()
    process.stdin = None
    return process


@contextmanager
def silent_subnet_administrator() -> Iterator[None]:
    """No multicast group can be joined, so a child gets no carrier and ADD waits for it."""
    (KNOBS / "sa").write_text("off")
    try:
        yield
    finally:
        (KNOBS / "sa").write_text("on")


@row("J9", by=[IPOIB])
@pytest.mark.as_process
def test_add_that_is_killed_before_the_interface_is_made(
    node: Node, netns: Path, delegate: Delegate, subject: Subject
) -> None:
    delegate.answer("ADD", sleep=300)
    config = subject.config(ipam={"type": delegate.name})
    with unchanged_host(), started(node, netns, config) as process:
        until(lambda: delegate.commands == ["ADD"])
        process.kill()
        process.wait()
        if node.through_agent:  # the agent lives, and undoes the ADD of a dead launcher
            until(lambda: delegate.commands == ["ADD", "DEL"])
        delete(node, netns, config)
    assert delegate.commands == ["ADD", "DEL", *["DEL" for _ in range(node.through_agent)]]
    assert list(links(netns)) == ["lo"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["J9", "J10"])
@row("J9", "J10", by=[IPOIB])
@pytest.mark.as_process
def test_add_that_is_ended_after_the_interface_was_moved(
    node: Node, netns: Path, delegate: Delegate, subject: Subject, number: signal.Signals
) -> None:
    """After SIGTERM the plugin rolls back; after SIGKILL the DEL removes the rest."""
    config = subject.config(pkey="0x8002", wait_carrier=60, ipam={"type": delegate.name})
    with unchanged_host(), silent_subnet_administrator():
        with started(node, netns, config) as process:
            until(lambda: "UP" in links(netns).get("eth0", {}).get("flags", ()))
            process.send_signal(number)
            stdout, _ = process.communicate(timeout=PATIENCE)
        if node.through_agent:  # the agent lives, and undoes the ADD of a dead launcher
            assert stdout == b""
            until(lambda: delegate.commands == ["ADD", "DEL"])
            assert list(links(netns)) == ["lo"]
        elif number == signal.SIGTERM:
            assert json.loads(stdout)["code"] == 11
            assert list(links(netns)) == ["lo"]
            assert delegate.commands == ["ADD", "DEL"]
        else:
            assert stdout == b""
        delete(node, netns, config)
        assert list(links(netns)) == ["lo"]


@row("I6", by=[IPOIB])
def test_zz_del_after_the_parent_has_gone(
    node: Node, netns: Path, delegate: Delegate, subject: Subject
) -> None:
    """Last in the file, because it unplugs the HCAs and plugs them in again."""
    config = subject.config(ipam={"type": delegate.name})
    add(node, netns, config)
    try:
        subprocess.run(["/sbin/modprobe", "--remove", "ibloop"], check=True)
        delete(node, netns, config)
    finally:
        subprocess.run(["/sbin/modprobe", "ibloop"], check=True)
        for parent in (PARENT, WITNESS):
            subprocess.run([IP, "link", "set", parent, "up"], check=True)
        until(lambda: all("LOWER_UP" in links()[name]["flags"] for name in (PARENT, WITNESS)))
    assert delegate.commands == ["ADD", "DEL"]
