"""Table M: the process and its streams. Every expected error also checks M1, the exit code."""

import os
import shutil
import signal
from pathlib import Path

from tests.conformance.expect import ADDED, OK, Err
from tests.conformance.node import Delegate, Node, encoded
from tests.conformance.rows import row
from tests.conformance.subject import ADDING, ALL_VERSIONS, EVERY, NOOP, Subject
from tests.waiting import until


@row("M1")
def test_error_is_exit_code_1(node: Node, subject: Subject) -> None:
    assert node.call(subject, CNI_IFNAME="..").exit_code == 1


@row("M2", by=[NOOP])
def test_uncaught_exception_is_a_document_and_a_traceback_on_stderr(
    node: Node, subject: Subject
) -> None:
    outcome = node.call(subject, NOOP='{"raises":"boom"}')
    Err(999, contains="boom").met_by(outcome)
    assert "Traceback" in outcome.stderr


@row("M3", by=[NOOP])
def test_what_libraries_and_children_print_goes_to_stderr(node: Node, subject: Subject) -> None:
    """An agent's libraries and children write to its streams, so their output is in its log."""
    outcome = node.call(subject, NOOP='{"prints":"chatter"}')
    ADDED.met_by(outcome)
    assert outcome.stderr.count("chatter") == (0 if node.through_agent else 2)
    failed = node.call(subject, NOOP='{"prints":"chatter","fails":[103,"no"]}')
    Err(103, "no").met_by(failed)


@row("M4", by=EVERY)
def test_closed_output_is_an_error_and_not_a_hang(node: Node, subject: Subject) -> None:
    """No process reads the answer, of an ADD and of VERSION."""
    for command in ("ADD", "VERSION"):
        reading, writing = os.pipe()
        os.close(reading)
        try:
            outcome = node.run(subject, node.environ(CNI_COMMAND=command), stdout=writing)
        finally:
            os.close(writing)
        assert outcome.exit_code > 0


@row("M6", by=ADDING)
def test_no_process_survives_exit(node: Node, subject: Subject) -> None:
    ADDED.met_by(node.call(subject))
    OK.met_by(node.call(subject, "DEL"))
    assert node.processes() == []


@row("M6", by=[NOOP])
def test_delegate_does_not_outlive_a_killed_plugin(
    node: Node, delegate: Delegate, subject: Subject
) -> None:
    delegate.answer("ADD", sleep=600)
    with node.start(subject) as process:
        assert process.stdin is not None
        process.stdin.write(encoded(subject.config(ipam={"type": delegate.name})))
        process.stdin.close()
        until(lambda: delegate.commands or process.poll() is not None)
        assert process.poll() is None
        process.kill()
    until(lambda: not any(is_delegate(pid, delegate) for pid in node.processes()))


def is_delegate(pid: int, delegate: Delegate) -> bool:
    """Whether a process is the delegate itself; its children may end later."""
    try:
        return str(delegate.directory) in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


@row("M6", by=[NOOP])
def test_killed_plugin_prints_nothing(node: Node, subject: Subject) -> None:
    outcome = node.call(subject, NOOP='{"killed_by":9}')
    if node.through_agent:  # the agent is killed, and the launcher prints an error for that
        Err(11, contains="ended the connection").met_by(outcome)
        until(lambda: node.call(subject, "DEL").exit_code == 0)  # by the next agent
        return
    assert (outcome.exit_code, outcome.stdout) == (-signal.SIGKILL, b"")


@row("M7", by=EVERY)
def test_environment_may_have_cni_variables_only(node: Node, subject: Subject) -> None:
    command = "ADD" if subject.adds else "DEL"
    environ = {
        name: value
        for name, value in node.environ(CNI_COMMAND=command).items()
        if name.startswith(("CNI_", "PODFABRIC_"))
    }
    expected = ADDED if subject.adds else OK
    expected.met_by(node.run(subject, environ))


@row("M8", by=EVERY)
def test_root_may_be_another_view_of_the_same_tree(
    node: Node, tmp_path: Path, subject: Subject
) -> None:
    """As under Multus with its chrootDir, where the host's root is mounted elsewhere."""
    root = tmp_path / "hostroot"
    root.mkdir()
    script = 'mount --rbind / "$0" && exec chroot "$0" "$@"'
    unshare, shell = shutil.which("unshare") or "unshare", "/bin/sh"
    through = (unshare, "--mount", "--propagation", "private", shell, "-c", script, str(root))
    command = "ADD" if subject.adds else "DEL"
    outcome = node.run(subject, node.environ(CNI_COMMAND=command), through=through)
    (ADDED if subject.adds else OK).met_by(outcome)
    version = node.run(subject, node.environ(CNI_COMMAND="VERSION"), through=through)
    assert version.document["supportedVersions"] == list(ALL_VERSIONS)
    if subject.adds:
        OK.met_by(node.call(subject, "DEL"))
