"""Tables G and H: results, and results after another plugin's."""

import json
import socket
from typing import Any

import pytest

from tests.conformance.expect import Err
from tests.conformance.node import Node, encoded
from tests.conformance.rows import COVERED, row, variants
from tests.conformance.subject import ADDING, ALL_VERSIONS, IPAM, IPOIB, NOOP, Subject
from tests.unit.spec.golden import GOLDEN, INPUT

OLDEST = ("0.1.0", "0.2.0")
COVERED.update(f"G{number}" for number in range(1, 8))


@pytest.mark.parametrize(
    ("version", "golden"),
    [pytest.param(v, g, id=f"G{n}-noop-{v}") for n, (v, g) in enumerate(GOLDEN) if n],
)
def test_result_equals_the_references_in_every_version(
    node: Node, version: str, golden: dict[str, Any]
) -> None:
    config = NOOP.config(cniVersion=version)
    outcome = node.call(NOOP, config=config, NOOP=json.dumps({"result": INPUT}))
    assert outcome.exit_code == 0
    assert outcome.document == golden


@variants("version", "G8", ["absent", "0.1.0", "0.2.0"])
@row("G8", by=[IPOIB])
def test_version_that_cannot_show_the_result_is_refused_before_anything_is_done(
    node: Node, subject: Subject, version: str
) -> None:
    """Without "ipam" there are no addresses, and a result of these versions needs one."""
    config = subject.config(cniVersion=None if version == "absent" else version)
    outcome = node.call(subject, config=config)
    Err(7, contains="cannot convert: no valid IP addresses").met_by(outcome)
    assert node.untouched()


ROUTE = {"dst": "10.8.0.0/16", "gw": "10.9.0.254"}
ATTRIBUTES = {"mtu": 1400, "priority": 100, "table": 50, "scope": 0}
TWO_RANGES = {
    "type": "podfabric-ipam",
    "ipRanges": [{"range": "10.9.0.0/24"}, {"range": "fd00:9::/64"}],
    "routes": [{**ROUTE, **ATTRIBUTES}, {"dst": "fd00:8::/64"}],
}


@variants("version", "G9+G13+G14+G15", ALL_VERSIONS)
@row("G9", "G13", "G14", "G15", by=[IPAM])
def test_addresses_are_answered_in_every_version(
    node: Node, subject: Subject, version: str
) -> None:
    document = node.call(
        subject, config=subject.config(cniVersion=version, ipam=TWO_RANGES)
    ).document
    assert document["cniVersion"] == version
    assert "interfaces" not in document
    if version in OLDEST:
        assert document["ip4"] == {"ip": FIRST_V4, "routes": [ROUTE]}
        assert document["ip6"] == {"ip": FIRST_V6, "routes": [{"dst": "fd00:8::/64"}]}
        return
    assert "ip" not in document
    assert [ip["address"] for ip in document["ips"]] == [FIRST_V4, FIRST_V6]
    assert not any("interface" in ip for ip in document["ips"])
    if version < "1":
        assert [ip["version"] for ip in document["ips"]] == ["4", "6"]
    assert document["routes"] == [{**ROUTE, **ATTRIBUTES}, {"dst": "fd00:8::/64"}]


FIRST_V4, FIRST_V6 = "10.9.0.1/24", "fd00:9::1/64"


@row("G16", by=ADDING)
def test_document_is_written_at_once(node: Node, subject: Subject) -> None:
    """The test reads through a socket that keeps message boundaries."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert node.run(subject, stdout=theirs.fileno()).exit_code == 0
        theirs.close()
        first, second = ours.recv(1 << 20), ours.recv(1 << 20)
    assert json.loads(first.decode())["cniVersion"] == "1.0.0"
    assert second == b""


PREVIOUS: dict[str, Any] = {
    "cniVersion": "1.0.0",
    "interfaces": [
        {"name": "eth0", "mac": "02:00:00:00:00:01", "sandbox": "/var/run/netns/T"},
    ],
    "ips": [{"address": "10.1.2.3/24", "gateway": "10.1.2.1", "interface": 0}],
    "routes": [{"dst": "0.0.0.0/0"}],
    "dns": {"nameservers": ["10.1.2.1"]},
}


def chained(node: Node, previous: dict[str, Any], version: str = "1.0.0") -> dict[str, Any]:
    config = NOOP.config(cniVersion=version, prevResult=previous)
    outcome = node.call(NOOP, config=config)
    assert outcome.exit_code == 0, outcome
    return outcome.document


@row("H1", by=[NOOP])
def test_previous_result_passes_unchanged(node: Node, subject: Subject) -> None:
    assert chained(node, PREVIOUS) == PREVIOUS


@row("H3", by=[NOOP])
def test_previous_result_without_a_version_is_the_configuration_s(
    node: Node, subject: Subject
) -> None:
    without = {key: value for key, value in PREVIOUS.items() if key != "cniVersion"}
    assert chained(node, without) == PREVIOUS


@row("H4", by=[NOOP, IPOIB])
def test_previous_result_of_another_family_is_an_error(node: Node, subject: Subject) -> None:
    config = subject.config(prevResult={**PREVIOUS, "cniVersion": "0.3.1"})
    message = 'result type supports [1.0.0 1.1.0] but unmarshalled CNIVersion is "0.3.1"'
    Err(6, contains=message).met_by(node.call(subject, config=config))


@row("H5", by=[NOOP])
def test_previous_result_of_the_same_family_is_accepted(node: Node, subject: Subject) -> None:
    ips = [{"version": "4", "address": "10.1.2.3/24", "interface": 0}]
    previous = {**PREVIOUS, "cniVersion": "0.3.1", "ips": ips}
    assert chained(node, previous, "0.4.0") == {**previous, "cniVersion": "0.4.0"}


@row("H6", by=[NOOP])
def test_newer_keys_of_interfaces_are_preserved(node: Node, subject: Subject) -> None:
    extra = {"mtu": 2044, "pciID": "0000:03:00.2", "socketPath": "/run/s"}
    previous = {**PREVIOUS, "interfaces": [{**PREVIOUS["interfaces"][0], **extra}]}
    assert chained(node, previous) == previous


@row("H7", by=[NOOP])
def test_unknown_keys_of_the_previous_result_are_kept(node: Node, subject: Subject) -> None:
    previous = {
        **PREVIOUS,
        "vendor": {"x": [1, None]},
        "interfaces": [{**PREVIOUS["interfaces"][0], "future": True}],
    }
    assert chained(node, previous) == previous


@row("H10", by=[NOOP])
def test_previous_result_of_the_oldest_family_is_echoed(node: Node, subject: Subject) -> None:
    previous = {"cniVersion": "0.2.0", "ip4": {"ip": "10.1.2.3/24"}, "dns": {}}
    assert chained(node, previous, "0.2.0") == previous


@row("H4", by=[NOOP])
def test_previous_result_that_is_not_a_result_is_an_error(node: Node, subject: Subject) -> None:
    wrong: list[Any] = [{"ips": {}}, {"ips": [{"address": "10.1.2.3"}]}, [], "x"]
    for previous in wrong:
        config = encoded(subject.config(prevResult=previous))
        Err(6).met_by(node.call(subject, config=config))
