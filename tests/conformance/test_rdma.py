"""The rows of `rdma`, which works only after another plugin."""

from pathlib import Path

from tests.conformance.expect import OK, Err
from tests.conformance.node import Node
from tests.conformance.rows import row
from tests.conformance.subject import RDMA, Subject

PREVIOUS = {
    "cniVersion": "1.0.0",
    "interfaces": [{"name": "eth0", "mac": "02:00:00:00:00:01", "sandbox": "/var/run/netns/T"}],
    "ips": [],
}


@row("H8", by=[RDMA])
def test_add_without_a_previous_result(node: Node, netns: Path, subject: Subject) -> None:
    failed = node.call(subject, "ADD", subject.config(), CNI_NETNS=str(netns))
    Err(7, contains="prevResult").met_by(failed)


@row("H9", by=[RDMA])
def test_del_without_a_previous_result(node: Node, netns: Path, subject: Subject) -> None:
    for _ in range(2):
        OK.met_by(node.call(subject, "DEL", subject.config(), CNI_NETNS=str(netns)))


@row("H8", by=[RDMA])
def test_add_behind_another_plugin_than_ours(node: Node, netns: Path, subject: Subject) -> None:
    config = subject.config(prevResult=PREVIOUS)
    failed = node.call(subject, "ADD", config, CNI_NETNS=str(netns))
    Err(7, contains='put "rdma" behind "sriov"').met_by(failed)


def test_gc_is_accepted(node: Node) -> None:
    config = RDMA.config(cniVersion="1.1.0", **{"cni.dev/valid-attachments": []})
    OK.met_by(node.call(RDMA, "GC", config))
