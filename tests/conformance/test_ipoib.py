"""The rows that need an interface: `ipoib` on real drivers, in the virtual machine.

A process takes a second or two to start there, so that one ADD serves several rows.
"""

import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.expect import OK, Added, Err
from tests.conformance.node import IP, Delegate, Node, Outcome, encoded, inhabitants, ip
from tests.conformance.rows import row
from tests.conformance.subject import FIRST, IPAM, IPOIB, Subject

pytestmark = pytest.mark.kernel

PARENT, WITNESS = "ib0", "ib1"
KNOBS = Path("/sys/class/infiniband/ibloop0/ibloop")
WITH_IPAM = {"ipam": IPAM.keys["ipam"]}
KEY = "cni.dev/valid-attachments"
PATIENCE = 30.0  # seconds, for what the kernel does in the background

Links = dict[str, dict[str, Any]]


def links(netns: Path | None = None) -> Links:
    """Every link of a namespace by its name, as ip(8) shows it in detail."""
    where = ["-netns", netns.name] if netns else []
    return {one["ifname"]: one for one in json.loads(ip(*where, "-json", "-details", "link"))}


def addresses(netns: Path, name: str = "eth0") -> dict[str, dict[str, Any]]:
    """The addresses of global scope of a link."""
    (shown,) = json.loads(ip("-netns", netns.name, "-json", "address", "show", "dev", name))
    return {
        f"{one['local']}/{one['prefixlen']}": one
        for one in shown["addr_info"]
        if one["scope"] == "global"
    }


def routes(netns: Path, family: str = "-4") -> dict[str, dict[str, Any]]:
    """The main table's routes by destination."""
    shown = json.loads(ip("-netns", netns.name, "-json", family, "route"))
    return {one["dst"]: one for one in shown}


def host_state() -> dict[str, tuple[object, ...]]:
    """What an attachment must leave of the host as it was: names, aliases, state, MTU."""
    return {
        name: (one.get("ifalias"), sorted(one["flags"]), one["mtu"], one.get("master"))
        for name, one in links().items()
    }


@pytest.fixture(autouse=True)
def no_strays(netns: Path) -> Iterator[None]:
    """What a failed test leaves comes back from its namespace: no other test should see it."""
    yield
    if (netns.exists() and len(links(netns)) > 1) or strays():
        ip("netns", "delete", netns.name)
        time.sleep(3)
        for name in strays():
            ip("link", "delete", name)


def strays() -> list[str]:
    return [name for name, one in links().items() if "podfabric:" in one.get("ifalias", "")]


@contextmanager
def unchanged_host() -> Iterator[None]:
    """The block leaves the host's links as they were, at the latest after a while. (N4, N7)"""
    before = host_state()
    yield
    deadline = time.monotonic() + PATIENCE
    while host_state() != before and time.monotonic() < deadline:
        time.sleep(0.2)
    assert host_state() == before


def add(node: Node, netns: Path, config: dict[str, Any], **environ: str | None) -> dict[str, Any]:
    given = node.environ(**{"CNI_NETNS": str(netns), **environ})
    outcome = node.run(IPOIB, given, config)
    Added(config.get("cniVersion", "0.1.0")).met_by(outcome)
    return outcome.document


def delete(node: Node, netns: Path, config: dict[str, Any], **environ: str | None) -> None:
    given = node.environ(**{"CNI_COMMAND": "DEL", "CNI_NETNS": str(netns), **environ})
    OK.met_by(node.run(IPOIB, given, config))


DUAL = {
    "type": "podfabric-ipam",
    "ipRanges": [
        {"range": "10.9.0.0/24", "gateway": "10.9.0.254"},
        {"range": "fd00:9::/64", "gateway": "fd00:9::fe"},
    ],
    "routes": [{"dst": "0.0.0.0/0"}, {"dst": "10.8.0.0/16", "gw": "10.9.0.253"}],
}


@row(
    *("B10", "B11", "E14", "F10", "G9", "G10", "G11", "G12", "G16", "M6"),
    *("N1", "N2", "N3", "N4", "N5", "N6", "N7"),
    by=[IPOIB],
)
def test_add_answers_what_the_kernel_shows_and_del_takes_it_away(
    node: Node, netns: Path, subject: Subject
) -> None:
    config = subject.config(
        cniVersion="1.1.0",
        ipam=DUAL,
        capabilities={"ips": True},
        **{"vendor.example/x": [1]},
    )
    with unchanged_host():
        with unchanged_host(), announcements(WITNESS) as announced:
            result = add(node, netns, config)
        link = links(netns)["eth0"]
        assert (link["linkinfo"]["info_kind"], link["link_type"]) == ("ipoib", "infiniband")
        assert {"UP", "LOWER_UP"} <= set(link["flags"])
        assert link["linkinfo"]["info_data"]["key"] == "0xffff"
        assert link["mtu"] == links()[PARENT]["mtu"]
        parent = ip("netns", "exec", netns.name, "cat", "/sys/class/net/eth0/iflink")
        assert int(parent) == links()[PARENT]["ifindex"]

        (interface,) = result["interfaces"]
        assert interface.pop("pciID", "")[:1] in ("", "0")  # ibloop's adapters may be on no bus
        assert interface == {
            "name": "eth0",
            "mac": link["address"],
            "mtu": link["mtu"],
            "sandbox": str(netns),
        }
        assert interface["mac"] == interface["mac"].lower()
        assert [(ip["address"], ip["interface"]) for ip in result["ips"]] == [
            ("10.9.0.1/24", 0),
            ("fd00:9::1/64", 0),
        ]

        present = addresses(netns)
        assert set(present) == {"10.9.0.1/24", "fd00:9::1/64"}
        assert not any(one.get("tentative") for one in present.values())
        assert routes(netns)["default"]["gateway"] == "10.9.0.254"
        assert routes(netns)["10.8.0.0/16"]["gateway"] == "10.9.0.253"
        assert {"10.9.0.1", "fd00:9::1"} <= announced
        assert inhabitants(netns) == []
        assert node.processes() == []

        OK.met_by(
            node.call(subject, "CHECK", {**config, "prevResult": result}, CNI_NETNS=str(netns))
        )
        delete(node, netns, config)
        assert list(links(netns)) == ["lo"]


@contextmanager
def announcements(interface: str) -> Iterator[set[str]]:
    """The addresses that gratuitous ARP and unsolicited NAs on the fabric named meanwhile."""
    seen: set[str] = set()
    over = threading.Event()
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3)) as sniffer:
        sniffer.bind((interface, 3))
        sniffer.settimeout(0.2)
        listener = threading.Thread(target=_listen, args=(sniffer, seen, over))
        listener.start()
        try:
            yield seen
            time.sleep(1)  # for what is on its way
        finally:
            over.set()
            listener.join()


def _listen(sniffer: socket.socket, seen: set[str], over: threading.Event) -> None:
    while not over.is_set():
        try:
            packet, (_, protocol, *_) = sniffer.recvfrom(4096)
        except TimeoutError:
            continue
        if protocol == 0x0806 and packet[4] == 20:
            sender, target = packet[28:32], packet[52:56]
            if sender == target:
                seen.add(socket.inet_ntop(socket.AF_INET, sender))
        elif protocol == 0x86DD and packet[6] == 58 and packet[40] == 136:
            seen.add(socket.inet_ntop(socket.AF_INET6, packet[48:64]))


@row("E16", "E17", "E18", "E21", "I2", "I5", by=[IPOIB])
def test_check_finds_what_is_gone_and_del_does_not_mind(
    node: Node, netns: Path, subject: Subject
) -> None:
    route = {"dst": "10.8.0.0/16", "gw": "10.9.0.253"}
    config = subject.config(ipam={**IPAM.keys["ipam"], "routes": [route]})
    in_pod = ("-netns", netns.name)
    with unchanged_host():
        result = add(node, netns, config)
        previous = {**config, "prevResult": result}

        ip(*in_pod, "address", "add", "10.99.0.1/24", "dev", "eth0")
        ip(*in_pod, "route", "add", "10.98.0.0/16", "via", "10.99.0.2")
        OK.met_by(node.call(subject, "CHECK", previous, CNI_NETNS=str(netns)))

        ip(*in_pod, "route", "delete", route["dst"])
        outcome = node.call(subject, "CHECK", previous, CNI_NETNS=str(netns))
        Err(102, contains="10.8.0.0/16").met_by(outcome)

        ip(*in_pod, "address", "delete", FIRST, "dev", "eth0")
        outcome = node.call(subject, "CHECK", previous, CNI_NETNS=str(netns))
        Err(102, contains=(FIRST, "eth0")).met_by(outcome)

        ip(*in_pod, "link", "delete", "eth0")
        outcome = node.call(subject, "CHECK", previous, CNI_NETNS=str(netns))
        Err(102, contains='"eth0"').met_by(outcome)

        delete(node, netns, config)
        delete(node, netns, config)
    assert node.call(IPAM, CNI_CONTAINERID="c2").addresses == [FIRST]


@row("E20", "J11", by=[IPOIB])
def test_second_add_is_an_error_that_takes_nothing_away(
    node: Node, netns: Path, subject: Subject
) -> None:
    config = subject.config(**WITH_IPAM)
    with unchanged_host():
        result = add(node, netns, config)
        outcome = node.call(subject, config=config, CNI_NETNS=str(netns))
        Err(103, contains="eth0").met_by(outcome)
        assert set(addresses(netns)) == {FIRST}
        # Still reserved, and missed once it is released by hand.
        Err(103).met_by(node.call(IPAM))
        OK.met_by(node.call(IPAM, "DEL"))
        previous = {**config, "prevResult": result}
        outcome = node.call(subject, "CHECK", previous, CNI_NETNS=str(netns))
        Err(102, contains="10.9.0.1").met_by(outcome)
        delete(node, netns, config)


@row("I3", by=[IPOIB])
def test_del_after_the_namespace_has_gone(
    node: Node, netns: Path, delegate: Delegate, subject: Subject
) -> None:
    """The kernel gives an IPoIB child of a dead namespace back to the host: it must go, too."""
    config = subject.config(ipam={"type": delegate.name})
    with unchanged_host():
        add(node, netns, config)
        ip("netns", "delete", netns.name)
        delete(node, netns, config)
        assert not netns.exists()
    assert delegate.commands == ["ADD", "DEL"]


@row("I4", by=[IPOIB])
def test_del_without_the_namespace_s_path(
    node: Node, netns: Path, delegate: Delegate, subject: Subject
) -> None:
    config = subject.config(ipam={"type": delegate.name})
    with unchanged_host():
        add(node, netns, config)
        delete(node, netns, config, CNI_NETNS=None)
        assert list(links(netns)) == ["lo"]
    assert delegate.commands == ["ADD", "DEL"]


@row("I9", by=[IPOIB])
def test_del_without_the_ipam_key(
    node: Node, netns: Path, delegate: Delegate, subject: Subject
) -> None:
    """The journal knows which IPAM plugin was asked."""
    with unchanged_host():
        add(node, netns, subject.config(ipam={"type": delegate.name}))
        delete(node, netns, subject.config(master=None))
        assert list(links(netns)) == ["lo"]
    assert delegate.commands == ["ADD", "DEL"]


@row("I8", by=[IPOIB])
def test_del_leaves_the_other_interface_alone(node: Node, netns: Path, subject: Subject) -> None:
    config = subject.config(**WITH_IPAM)
    with unchanged_host():
        add(node, netns, config)
        add(node, netns, config, CNI_IFNAME="eth1")
        delete(node, netns, config, CNI_IFNAME="eth1")
        assert set(addresses(netns)) == {FIRST}
        assert "eth1" not in links(netns)
        delete(node, netns, config)


@row("I11", "I13", by=[IPOIB])
def test_del_removes_the_interface_although_the_delegate_fails(
    node: Node, netns: Path, delegate: Delegate, subject: Subject
) -> None:
    config = subject.config(ipam={"type": delegate.name})
    with unchanged_host():
        add(node, netns, config)
        delegate.fail("DEL", 100, "store not found")
        outcome = node.call(subject, "DEL", config, CNI_NETNS=str(netns))
        Err(104, contains="store absent").met_by(outcome)
        assert list(links(netns)) == ["lo"]
        delegate.answer("DEL")
        delete(node, netns, config)


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


@row("J2", by=[IPOIB])
def test_exhausted_pool_gives_the_same_error_again(
    node: Node, netns: Path, subject: Subject
) -> None:
    ipam = {"type": "podfabric-ipam", "range": "10.9.0.0/30", "exclude": ["10.9.0.0/30"]}
    config = subject.config(ipam=ipam)
    with unchanged_host():
        outcomes = [node.call(subject, config=config, CNI_NETNS=str(netns)) for _ in range(2)]
        for outcome in outcomes:
            Err(110).met_by(outcome)
        assert outcomes[0].document == outcomes[1].document
    assert list(links(netns)) == ["lo"]


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
def test_delegate_is_undone_when_its_answer_is_of_no_use(
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
    config = subject.config(cniVersion="1.1.0", ipam={"type": "nowhere"})
    with unchanged_host():
        outcome = node.call(subject, config=config, CNI_NETNS=str(netns))
        Err(7, contains='failed to find plugin "nowhere" in path [').met_by(outcome)
    assert list(links(netns)) == ["lo"]
    outcome = node.call(subject, "STATUS", config)
    Err(50, contains='failed to find plugin "nowhere"').met_by(outcome)


@row("K1", "E2", "E10", by=[IPOIB])
def test_every_verb_is_passed_on_as_it_came(
    node: Node, netns: Path, delegate: Delegate, subject: Subject
) -> None:
    config = subject.config(cniVersion="1.1.0", ipam={"type": delegate.name, "x": 1})
    sent = []
    with unchanged_host():
        for command in ("STATUS", "ADD", "CHECK", "DEL", "GC"):
            environ = node.environ(CNI_COMMAND=command, CNI_NETNS=str(netns))
            stdin = b" " + encoded({**config, KEY: []}) + b"\n"
            outcome = node.run(subject, environ, stdin)
            assert outcome.exit_code == 0, outcome
            if command == "ADD":
                config["prevResult"] = outcome.document
            sent.append((environ, stdin))
    calls = delegate.calls
    assert [call.stdin for call in calls] == [stdin for _, stdin in sent]
    for call, (environ, _) in zip(calls, sent, strict=True):
        assert {k: v for k, v in call.environ.items() if k != "LC_CTYPE"} == environ


@row("E12", by=[IPOIB])
def test_status_of_the_delegate_is_passed_up(
    node: Node, delegate: Delegate, subject: Subject
) -> None:
    delegate.fail("STATUS", 51, "pool is full")
    config = subject.config(cniVersion="1.1.0", ipam={"type": delegate.name})
    Err(51, contains="pool is full").met_by(node.call(subject, "STATUS", config))


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


@pytest.mark.parametrize("version", [None, "0.4.0"])
@row("C1", "G9", "G10", by=[IPOIB])
def test_older_versions_get_their_own_results(
    node: Node, netns: Path, subject: Subject, version: str | None
) -> None:
    config = subject.config(cniVersion=version, **WITH_IPAM)
    with unchanged_host():
        result = add(node, netns, config)
        if version is None:
            assert result == {"cniVersion": "0.1.0", "ip4": {"ip": FIRST}, "dns": {}}
        else:
            mac = links(netns)["eth0"]["address"]
            assert result == {
                "cniVersion": version,
                "interfaces": [{"name": "eth0", "mac": mac, "sandbox": str(netns)}],
                "ips": [{"version": "4", "address": FIRST, "interface": 0}],
                "dns": {},
            }
        delete(node, netns, config)


@row("H1", "H6", "H7", "K5", by=[IPOIB])
def test_previous_result_is_kept_and_ours_goes_behind_it(
    node: Node, netns: Path, subject: Subject
) -> None:
    """With an empty "ipam.type", which is an interface without addresses."""
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
    """An ADD that is under way."""
    process = node.start(IPOIB, node.environ(CNI_NETNS=str(netns)))
    assert process.stdin is not None
    process.stdin.write(encoded(config))
    process.stdin.close()
    process.stdin = None
    return process


@contextmanager
def silent_subnet_administrator() -> Iterator[None]:
    """No multicast group can be joined, so that a child gets no carrier and ADD waits for it."""
    (KNOBS / "sa").write_text("off")
    try:
        yield
    finally:
        (KNOBS / "sa").write_text("on")


@row("J9", by=[IPOIB])
def test_add_that_is_killed_before_the_interface_is_made(
    node: Node, netns: Path, delegate: Delegate, subject: Subject
) -> None:
    delegate.answer("ADD", sleep=300)
    config = subject.config(ipam={"type": delegate.name})
    with unchanged_host(), started(node, netns, config) as process:
        until(lambda: delegate.commands == ["ADD"])
        process.kill()
        process.wait()
        delete(node, netns, config)
    assert delegate.commands == ["ADD", "DEL"]
    assert list(links(netns)) == ["lo"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["J9", "J10"])
@row("J9", "J10", by=[IPOIB])
def test_add_that_is_ended_after_the_interface_was_moved(
    node: Node, netns: Path, delegate: Delegate, subject: Subject, number: signal.Signals
) -> None:
    """SIGTERM is rolled back by itself, what SIGKILL leaves is removed by DEL."""
    config = subject.config(pkey="0x8002", wait_carrier=60, ipam={"type": delegate.name})
    with unchanged_host(), silent_subnet_administrator():
        with started(node, netns, config) as process:
            until(lambda: "UP" in links(netns).get("eth0", {}).get("flags", ()))
            process.send_signal(number)
            stdout, _ = process.communicate(timeout=PATIENCE)
        if number == signal.SIGTERM:
            assert json.loads(stdout)["code"] == 11
            assert list(links(netns)) == ["lo"]
            assert delegate.commands == ["ADD", "DEL"]
        else:
            assert stdout == b""
        delete(node, netns, config)
        assert list(links(netns)) == ["lo"]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@row("I6", by=[IPOIB])
def test_zz_del_after_the_parent_has_gone(
    node: Node, netns: Path, delegate: Delegate, subject: Subject
) -> None:
    """Last in the file: the adapters are unplugged, and plugged in again."""
    config = subject.config(ipam={"type": delegate.name})
    add(node, netns, config)
    try:
        subprocess.run(["/sbin/modprobe", "--remove", "ibloop"], check=True)
        delete(node, netns, config)
    finally:
        subprocess.run(["/sbin/modprobe", "ibloop"], check=True)
        for parent in (PARENT, WITNESS):
            subprocess.run([IP, "link", "set", parent, "up"], check=True)
        until(lambda: all("LOWER_UP" in links()[one]["flags"] for one in (PARENT, WITNESS)))
    assert delegate.commands == ["ADD", "DEL"]
