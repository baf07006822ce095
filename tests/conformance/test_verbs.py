"""Table E: GC, CHECK and STATUS."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.expect import ADDED, OK, Err
from tests.conformance.node import Delegate, Node, encoded
from tests.conformance.rows import COVERED, row
from tests.conformance.subject import IPAM, IPOIB, NOOP, Subject

KEY, OLD_KEY = "cni.dev/valid-attachments", "cni.dev/attachments"
C1 = [{"containerID": "c1", "ifname": "eth0"}]
C2 = [{"containerID": "c2", "ifname": "eth0"}]

# The reservations before each collection: (network, container id, interface).
HELD = (("n1", "c1", "eth0"), ("n1", "c1", "eth1"), ("n1", "c2", "eth0"), ("n2", "c2", "eth0"))


def in_store(*lines: int) -> list[tuple[str, str, str]]:
    return [HELD[line] for line in lines]


def fill(node: Node) -> None:
    for network, container_id, ifname in HELD:
        ADDED.met_by(
            node.call(
                IPAM,
                config=IPAM.config(name=network),
                CNI_CONTAINERID=container_id,
                CNI_IFNAME=ifname,
            )
        )


@pytest.fixture(scope="session")
def filled_state(
    executables: tuple[Path, ...],
    surroundings: Mapping[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    first = Node(tmp_path_factory.mktemp("filled"), executables, surroundings)
    fill(first)
    return first.state


@pytest.fixture
def filled(node: Node, filled_state: Path) -> Node:
    """A node with the reservations HELD."""
    shutil.copytree(filled_state, node.state)
    return node


def held(node: Node) -> list[tuple[str, str, str]]:
    """The reservations of HELD that still exist: a second ADD of a live attachment fails (J11)."""
    kept = []
    for network, container_id, ifname in HELD:
        outcome = node.call(
            IPAM, config=IPAM.config(name=network), CNI_CONTAINERID=container_id, CNI_IFNAME=ifname
        )
        if outcome.exit_code:
            kept.append((network, container_id, ifname))
    return kept


@row("E1", by=[NOOP])
def test_gc_with_nothing_to_collect_succeeds(node: Node, subject: Subject) -> None:
    OK.met_by(node.call(subject, "GC", subject.config(cniVersion="1.1.0")))


@row("E1", by=[IPAM, IPOIB])
def test_gc_of_an_empty_node_succeeds(node: Node, subject: Subject) -> None:
    OK.met_by(node.call(subject, "GC", subject.config(cniVersion="1.1.0", **{KEY: []})))


@row("E2", by=[NOOP, IPOIB])
def test_gc_is_passed_on_with_the_same_input(
    node: Node, delegate: Delegate, subject: Subject
) -> None:
    config = subject.config(cniVersion="1.1.0", ipam={"type": delegate.name}, **{KEY: C1})
    stdin = encoded(config) + b"\n"
    OK.met_by(node.call(subject, "GC", stdin))
    (call,) = delegate.calls
    assert (call.command, call.stdin) == ("GC", stdin)


COVERED.update(("E3", "E4", "E5", "E6"))


@pytest.mark.parametrize(
    ("keys", "left"),
    [
        pytest.param({KEY: C1}, in_store(0, 3), id="E3-podfabric-ipam"),
        pytest.param({OLD_KEY: C1}, in_store(0, 3), id="E4-podfabric-ipam"),
        pytest.param({OLD_KEY: C2, KEY: C1}, in_store(0, 3), id="E5-podfabric-ipam"),
        pytest.param({KEY: []}, in_store(3), id="E6-podfabric-ipam-empty"),
        pytest.param({KEY: None}, in_store(3), id="E6-podfabric-ipam-null"),
    ],
)
def test_gc_removes_what_is_not_listed_of_this_network(
    filled: Node, keys: dict[str, Any], left: list[tuple[str, str, str]]
) -> None:
    config = {**IPAM.config(cniVersion="1.1.0"), **keys}
    OK.met_by(filled.call(IPAM, "GC", config))
    assert held(filled) == left


@row("E7", by=[IPAM])
def test_gc_without_a_list_removes_nothing_and_warns(filled: Node, subject: Subject) -> None:
    outcome = filled.call(subject, "GC", subject.config(cniVersion="1.1.0"))
    OK.met_by(outcome)
    assert KEY in outcome.stderr
    assert held(filled) == list(HELD)


@row("E7", by=[IPOIB])
def test_gc_of_an_interface_plugin_without_a_list_says_so(node: Node, subject: Subject) -> None:
    outcome = node.call(subject, "GC", subject.config(cniVersion="1.1.0"))
    OK.met_by(outcome)
    assert KEY in outcome.stderr


@row("E9", by=[IPAM])
def test_second_gc_succeeds(filled: Node, subject: Subject) -> None:
    config = subject.config(cniVersion="1.1.0", **{KEY: C1})
    for _ in range(2):
        OK.met_by(filled.call(subject, "GC", config))
    assert held(filled) == in_store(0, 3)


@row("E10", by=[NOOP, IPAM])
def test_status_of_a_plugin_that_can_serve_succeeds(node: Node, subject: Subject) -> None:
    OK.met_by(node.call(subject, "STATUS", subject.config(cniVersion="1.1.0")))


@pytest.mark.parametrize("code", [50, 51])
@row("E12", by=[NOOP])
def test_status_of_the_delegate_is_passed_up(
    node: Node, delegate: Delegate, subject: Subject, code: int
) -> None:
    delegate.fail("STATUS", code, "pool is full")
    config = subject.config(cniVersion="1.1.0", ipam={"type": delegate.name})
    Err(code, "pool is full").met_by(node.call(subject, "STATUS", config))


@row("E13", by=[IPAM])
def test_status_of_an_exhausted_pool_is_unavailable(node: Node, subject: Subject) -> None:
    ipam = {"type": "podfabric-ipam", "range": "10.9.0.0/30"}
    config = subject.config(cniVersion="1.1.0", ipam=ipam)
    for container_id in ("c1", "c2"):
        OK.met_by(node.call(subject, "STATUS", config))
        assert node.call(subject, config=config, CNI_CONTAINERID=container_id).exit_code == 0
    Err(50, contains="10.9.0.0/30").met_by(node.call(subject, "STATUS", config))


@row("E13", by=[IPOIB])
def test_status_without_the_parent_is_unavailable(node: Node, subject: Subject) -> None:
    config = subject.config(cniVersion="1.1.0", master="none0")
    Err(50, contains='"none0"').met_by(node.call(subject, "STATUS", config))


@row("E14", by=[NOOP, IPAM])
def test_check_after_add_succeeds(node: Node, subject: Subject) -> None:
    result = node.call(subject).document
    OK.met_by(node.call(subject, "CHECK", subject.config(prevResult=result)))


@row("E15", by=[IPAM, IPOIB])
def test_check_without_the_result_is_an_error(node: Node, subject: Subject) -> None:
    Err(7, contains="prevResult missing").met_by(node.call(subject, "CHECK"))


@row("E20", by=[IPAM])
def test_check_finds_a_reservation_that_is_gone(node: Node, subject: Subject) -> None:
    result = node.call(subject).document
    OK.met_by(node.call(subject, "DEL"))
    outcome = node.call(subject, "CHECK", subject.config(prevResult=result))
    Err(102, contains="10.9.0.1").met_by(outcome)


@row("E20", by=[NOOP])
def test_check_of_the_delegate_is_passed_up(
    node: Node, delegate: Delegate, subject: Subject
) -> None:
    delegate.fail("CHECK", 102, "reservation is gone")
    config = subject.config(ipam={"type": delegate.name}, prevResult={"cniVersion": "1.0.0"})
    Err(102, "reservation is gone").met_by(node.call(subject, "CHECK", config))


@row("E22", by=[IPOIB])
def test_check_of_another_sandbox_is_an_error(node: Node, subject: Subject) -> None:
    interface = {"name": "eth0", "sandbox": "/var/run/netns/another"}
    previous = {"cniVersion": "1.0.0", "interfaces": [interface]}
    outcome = node.call(subject, "CHECK", subject.config(prevResult=previous))
    Err(102, contains="sandbox in prevResult").met_by(outcome)
