"""Table K: the calls of IPAM plugins, made by `noop`, which does nothing else."""

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.expect import ADDED, OK, Added, Err
from tests.conformance.node import Delegate, Node, encoded
from tests.conformance.rows import row, variants
from tests.conformance.subject import ALL_VERSIONS, NOOP, Subject
from tests.waiting import until

BRIEF = "5"  # seconds; on a busy machine, a working delegate answers within them


def configured(delegate: Delegate, **changes: object) -> dict[str, Any]:
    return NOOP.config(cniVersion="1.1.0", ipam={"type": delegate.name}, **changes)


@variants("command", "K1", ["ADD", "CHECK", "DEL", "GC", "STATUS"])
@row("K1", by=[NOOP])
def test_delegate_gets_our_environment_and_our_bytes(
    node: Node, delegate: Delegate, subject: Subject, command: str
) -> None:
    environ = node.environ(CNI_COMMAND=command, CNI_ARGS="A=b", SURPLUS="x y")
    stdin = b" " + encoded(configured(delegate, prevResult={"cniVersion": "1.1.0"})) + b"\n\n"
    if command == "ADD":
        stdin = b" " + encoded(configured(delegate)) + b"\n\n"
    assert node.run(subject, environ, stdin).exit_code == 0
    (call,) = delegate.calls
    # The interpreter may add its locale to the environment (PEP 538).
    assert {k: v for k, v in call.environ.items() if k != "LC_CTYPE"} == environ
    assert call.stdin == stdin


@row("K2", by=[NOOP])
def test_delegate_is_taken_from_the_installation_and_not_from_cni_path(
    node: Node, tmp_path: Path, delegate: Delegate, subject: Subject
) -> None:
    other = Delegate.install(tmp_path / "other", delegate.name)
    path = f"{other.directory}:{delegate.directory}"
    OK.met_by(node.call(subject, "STATUS", configured(delegate), CNI_PATH=path))
    assert (delegate.commands, other.commands) == (["STATUS"], [])


@pytest.mark.parametrize("directory", [False, True])
@row("K3", by=[NOOP])
def test_delegate_must_be_a_file(node: Node, subject: Subject, directory: bool) -> None:
    path = node.delegates / "x"
    node.delegates.mkdir()
    path.mkdir() if directory else path.symlink_to("nowhere")
    outcome = node.call(subject, "STATUS", NOOP.config(cniVersion="1.1.0", ipam={"type": "x"}))
    Err(7, contains=f'failed to find plugin "x" in path [{node.delegates}]').met_by(outcome)


@row("K4", by=[NOOP])
def test_type_that_is_a_path_is_refused(node: Node, subject: Subject) -> None:
    outcome = node.call(subject, config=subject.config(ipam={"type": "a/b"}))
    Err(7, contains="invalid plugin name: a/b").met_by(outcome)


@row("K5", by=[NOOP])
def test_empty_type_means_no_delegate(node: Node, subject: Subject) -> None:
    ADDED.met_by(node.call(subject, config=subject.config(ipam={"type": ""})))


@row("K6", by=[NOOP])
def test_error_document_of_the_delegate_is_ours(
    node: Node, delegate: Delegate, subject: Subject
) -> None:
    document = {"code": 11, "msg": "try again later", "details": "because"}
    delegate.answer("ADD", document, exit_code=1)
    outcome = node.call(subject, config=configured(delegate))
    Err(11, "try again later", "because").met_by(outcome)


@pytest.mark.parametrize(
    ("stdout", "stderr", "message"),
    [
        pytest.param("", "boom", "boom", id="K7"),
        pytest.param("", "", "netplugin failed with no error message", id="K8"),
        pytest.param("boom", "", "error parsing its diagnostic message", id="K9"),
    ],
)
@row("K7+K8+K9", by=[NOOP])
def test_failure_without_a_document_is_explained(
    node: Node, delegate: Delegate, subject: Subject, stdout: str, stderr: str, message: str
) -> None:
    delegate.answer("ADD", stdout, stderr=stderr, exit_code=1)
    outcome = node.call(subject, config=configured(delegate))
    Err(999, contains=message).met_by(outcome)


@row("K10", by=[NOOP])
def test_missing_version_of_the_delegate_s_result_is_the_configuration_s(
    node: Node, delegate: Delegate, subject: Subject
) -> None:
    delegate.answer("ADD", {"ips": [{"address": "10.9.0.7/24"}]})
    outcome = node.call(subject, config=configured(delegate))
    Added("1.1.0").met_by(outcome)
    assert outcome.addresses == ["10.9.0.7/24"]


@variants("version", "K11", ALL_VERSIONS)
@row("K11", by=[NOOP])
def test_delegate_s_result_is_converted(
    node: Node, delegate: Delegate, subject: Subject, version: str
) -> None:
    address = "10.9.0.7/24"
    answer: dict[str, Any] = {"cniVersion": version, "ips": [{"address": address}]}
    if version in ("0.1.0", "0.2.0"):
        answer = {"cniVersion": version, "ip4": {"ip": address}}
    elif version < "1":
        answer["ips"][0]["version"] = "4"
    delegate.answer("ADD", answer)
    expected = {"cniVersion": "1.1.0", "ips": [{"address": address}]}
    assert node.call(subject, config=configured(delegate)).document == expected


@row("K12", by=[NOOP])
def test_standard_error_of_the_delegate_is_on_ours(
    node: Node, delegate: Delegate, subject: Subject
) -> None:
    delegate.answer("STATUS", stderr="a note\n")
    outcome = node.call(subject, "STATUS", configured(delegate))
    OK.met_by(outcome)
    assert "a note\n" in outcome.stderr


@row("K13", by=[NOOP])
def test_start_is_tried_again_while_the_delegate_is_being_written(
    node: Node, subject: Subject
) -> None:
    """The delegate is a program: for a script, the kernel would find the interpreter busy."""
    program = node.delegates / "true"
    program.parent.mkdir()
    shutil.copy("/bin/true", program)
    config = subject.config(cniVersion="1.1.0", ipam={"type": program.name})
    with program.open("r+b") as writer:
        threading.Timer(0.7, writer.close).start()
        started = time.monotonic()
        OK.met_by(node.call(subject, "STATUS", config))
    assert time.monotonic() - started > 0.7


@row("K14", by=[NOOP])
def test_hanging_delegate_is_killed_at_our_deadline(
    node: Node, delegate: Delegate, subject: Subject
) -> None:
    delegate.answer("ADD", sleep=600)
    outcome = node.call(subject, config=configured(delegate), NOOP=f'{{"patience": {BRIEF}}}')
    Err(11, contains=f"{BRIEF} s").met_by(outcome)
    assert delegate.commands == ["ADD", "DEL"]
    until(lambda: not node.processes())


@row("K14", by=[NOOP])
def test_delegate_that_hangs_while_it_is_undone_is_killed_too(
    node: Node, delegate: Delegate, subject: Subject
) -> None:
    for command in ("ADD", "DEL"):
        delegate.answer(command, sleep=600)
    outcome = node.call(subject, config=configured(delegate), NOOP='{"patience": 1}')
    Err(11, contains="ADD did not answer").met_by(outcome)
    until(lambda: not node.processes())
