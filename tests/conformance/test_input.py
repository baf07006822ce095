"""Table B: standard input and the configuration."""

import contextlib
import json
import os
import threading
from typing import IO

import pytest

from tests.conformance.expect import ADDED, OK, Err
from tests.conformance.node import Delegate, Node
from tests.conformance.rows import Case, row, table
from tests.conformance.subject import ADDING, EVERY, IPAM, IPOIB, NOOP, OURS, Subject

UNREADABLE = Err(6, contains="cannot be read as a JSON object: ")
NO_NAME = Err(7, '"name" is missing: give the network a name')
BAD_NAME = "is invalid: use letters, digits"
S0 = b'{"cniVersion":"1.0.0","name":"n1"}'


def everywhere(row_name: str, expected: Err, raw: bytes, note: str = "") -> Case:
    return Case(row_name, expected, raw=raw, note=note)


CASES = [
    everywhere("B1", UNREADABLE, b""),
    everywhere("B2", UNREADABLE, b"{"),
    everywhere("B3", UNREADABLE, S0 + b"x"),
    everywhere("B4", Err(6), b"[]"),
    everywhere("B5", NO_NAME, b"null"),
    Case("B6", NO_NAME, config={"name": None}, note="missing"),
    Case("B6", NO_NAME, config={"name": ""}, note="empty"),
    *(
        Case(
            "B7",
            Err(7, contains=('"name": "te%%st"', BAD_NAME)),
            {"CNI_COMMAND": command},
            {"name": "te%%st", "cniVersion": "1.1.0"},
            note=command,
        )
        for command in ("ADD", "CHECK", "DEL", "GC")
    ),
    Case("B8", Err(6), config={"name": 5}),
    # Deliberate: the reference quotes the line end, so a tenant could write lines into events.
    Case("B9", Err(7, contains=('"n1\\n"', BAD_NAME)), config={"name": "n1\n"}),
    Case("B11", ADDED, config={"capabilities": {"ips": True, "mac": 1}}, by=ADDING),
    # Deliberate: the reference takes the last key, another decoder may take the first.
    Case(
        "B12",
        Err(7, '"cniVersion" occurs twice: remove one of them'),
        raw=b'{"cniVersion":"0.2.0","name":"n1","cniVersion":"1.0.0",'
        b'"ipam":{"type":"podfabric-ipam","range":"10.9.0.0/24"}}',
    ),
    Case(
        "B12",
        OK,
        {"CNI_COMMAND": "DEL"},
        raw=b'{"cniVersion":"0.2.0","name":"n1","cniVersion":"1.0.0"}',
        note="DEL",
    ),
    *(
        everywhere("B14", UNREADABLE, S0[:-1] + b',"x":' + literal + b"}", literal.decode())
        for literal in (b"NaN", b"Infinity", b"-Infinity")
    ),
    everywhere("B14", UNREADABLE, b"\xef\xbb\xbf" + S0, "BOM"),
    everywhere("B14", UNREADABLE, S0[:-1] + b',"x":"\xff"}', "not UTF-8"),
    everywhere("B14", UNREADABLE, S0[:-1] + b',"x":' + b"[" * 50000 + b"]" * 50000 + b"}", "deep"),
    *(
        Case("B16", Err((6, 7), contains=key), config={key: value}, by=OURS, note=f"{key}-{note}")
        for key, note, value in (("ipam", "list", []), ("ipam", "text", "x"))
    ),
    *(
        Case(
            "B16",
            Err((6, 7), contains=key),
            config={"ipam": {**IPAM.keys["ipam"], key: value}},
            by=[IPAM],
            note=f"ipam.{key}",
        )
        for key, value in (("range", 5), ("exclude", "10.9.0.1"), ("routes", {}), ("gateway", []))
    ),
    *(
        Case("B16", Err((6, 7), contains=key), config={key: value}, by=[IPOIB], note=key)
        for key, value in (("mtu", "x"), ("pkey", []), ("umcast", 1), ("master", 5), ("mode", {}))
    ),
]


@table(CASES)
def test_input(node: Node, case: Case, subject: Subject) -> None:
    case.expected.met_by(node.run(subject, node.environ(**case.environ), case.stdin(subject)))
    if isinstance(case.expected, Err):
        assert node.untouched()


UNKNOWN = {
    "vendor.example/x": {"deep": [1, {"y": None}]},
    "surplus": 1,
    "args": {"cni": {"surplus": 1}, "other": [2]},
    "runtimeConfig": {"surplus": {"x": 1}},
}


@row("B10", by=ADDING)
def test_unknown_keys_pass(node: Node, subject: Subject) -> None:
    ADDED.met_by(node.call(subject, config=subject.config(**UNKNOWN)))


@row("B10", by=[NOOP])
def test_unknown_keys_reach_delegates_byte_by_byte(
    node: Node, delegate: Delegate, subject: Subject
) -> None:
    ipam = {"type": delegate.name, "surplus": {"x": 1.50}}
    stdin = json.dumps(subject.config(**UNKNOWN, ipam=ipam), indent=3).encode() + b" \n"
    ADDED.met_by(node.call(subject, config=stdin))
    (call,) = delegate.calls
    assert call.stdin == stdin


@row("B10", by=[IPAM])
def test_unknown_key_of_ipam_is_an_error_that_names_it(node: Node, subject: Subject) -> None:
    """Deliberate: only our plugin reads "ipam"; an ignored option would give wrong addresses."""
    config = subject.config(ipam={**subject.keys["ipam"], "range_strat": "10.9.0.5"})
    Err(7, contains=('"range_strat"', '"range_start"')).met_by(node.call(subject, config=config))
    assert node.untouched()


@row("B10", by=[IPOIB])
def test_key_that_looks_like_one_of_ours_is_an_error_that_names_both(
    node: Node, subject: Subject
) -> None:
    """Deliberate: ignoring a partition key would put the pod into another partition."""
    config = subject.config(pkeys="0x8001")
    Err(7, contains=('"pkeys"', '"pkey"')).met_by(node.call(subject, config=config))
    assert node.untouched()


@row("B10+B14", by=[IPOIB])
@pytest.mark.parametrize("value", ["1e999", '"\\ud800"'])
def test_unreadable_number_or_text_is_not_an_internal_error(
    node: Node, subject: Subject, value: str
) -> None:
    raw = f'{{"cniVersion":"1.0.0","name":"n1","master":"none0","x":{value}}}'.encode()
    outcome = node.call(subject, config=raw)
    assert outcome.document["code"] in (6, 7, 100)


@row("B13")
def test_unreadable_standard_input_is_an_io_failure(node: Node, subject: Subject) -> None:
    unreadable = os.open(os.devnull, os.O_WRONLY)
    try:
        outcome = node.run(subject, stdin=unreadable)
    finally:
        os.close(unreadable)
    Err(5, contains="error reading from stdin: ").met_by(outcome)
    assert node.untouched()


@row("B13")
def test_closed_standard_input_is_an_io_failure(node: Node, subject: Subject) -> None:
    outcome = node.run(subject, stdin=None, preexec_fn=lambda: os.close(0))
    Err(5, contains="error reading from stdin: ").met_by(outcome)
    assert node.untouched()


@row("B13")
def test_standard_input_that_closes_at_once_is_empty(node: Node, subject: Subject) -> None:
    UNREADABLE.met_by(node.run(subject, config=b""))


@row("B15", by=EVERY)
def test_large_configuration_may_come_byte_by_byte(node: Node, subject: Subject) -> None:
    padding = ["x" * 16_000] * 64  # the limit of an ADD
    config = subject.config(args={"cni": {"padding": padding}})
    command = "ADD" if subject.adds else "DEL"
    with node.start(subject, node.environ(CNI_COMMAND=command)) as process:
        assert process.stdin is not None
        writer = threading.Thread(
            target=_write_in_drops, args=(process.stdin, json.dumps(config).encode())
        )
        writer.start()
        assert process.stdout is not None
        stdout = process.stdout.read()
        writer.join()
    assert process.returncode == 0
    if subject.adds:
        assert json.loads(stdout)["cniVersion"] == "1.0.0"


def _write_in_drops(pipe: IO[bytes], content: bytes) -> None:
    drops = 1 << 16  # one byte each, then the rest: a million drops would take too long
    with contextlib.suppress(BrokenPipeError):
        for position in range(drops):
            os.write(pipe.fileno(), content[position : position + 1])
        pipe.write(content[drops:])
    with contextlib.suppress(BrokenPipeError):
        pipe.close()
