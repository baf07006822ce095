"""Table A: the environment."""

import os
from pathlib import Path

import pytest

from tests.conformance.expect import ADDED, OK, Err, NotCode
from tests.conformance.node import Delegate, Node
from tests.conformance.rows import Case, row, table
from tests.conformance.subject import ADDING, ALL_VERSIONS, EVERY, NOOP, Subject

AT_1_1 = {"cniVersion": "1.1.0"}
BAD_ID = "invalid characters in containerID"
TOO_LONG = Err(4, "interface name is too long", "interface name should be less than 16 characters")
BAD_NAME = Err(4, "interface name contains / or : or whitespace characters")


def missing(*variables: str) -> Err:
    return Err(4, f"required env variables [{','.join(variables)}] missing")


def without(*variables: str) -> dict[str, str | None]:
    return {f"CNI_{variable}": None for variable in variables}


def each_missing(row_name: str, command: str, *variables: str) -> list[Case]:
    return [
        Case(
            row_name,
            missing(f"CNI_{variable}"),
            {"CNI_COMMAND": command, **without(variable)},
            note=variable,
        )
        for variable in variables
    ]


def collecting(row_name: str, expected: Err | NotCode, **environ: str | None) -> list[Case]:
    return [
        Case(row_name, expected, {**environ, "CNI_COMMAND": command}, AT_1_1, note=command)
        for command in ("GC", "STATUS")
    ]


CASES = [
    Case("A3", Err(4, "unknown CNI_COMMAND: NOPE"), {"CNI_COMMAND": "NOPE"}),
    Case("A4", Err(4, "unknown CNI_COMMAND: add"), {"CNI_COMMAND": "add"}),
    Case(
        "A5",
        Err(6, contains="cannot be read as a JSON object"),
        {"CNI_COMMAND": "NOPE"},
        raw=b"",
    ),
    Case("A6", missing("CNI_CONTAINERID"), without("CONTAINERID")),
    Case("A7", missing("CNI_NETNS"), without("NETNS")),
    Case("A8", missing("CNI_IFNAME"), without("IFNAME")),
    Case("A9", missing("CNI_PATH"), without("PATH")),
    Case("A10", ADDED, without("ARGS"), by=ADDING),
    Case("A11", missing("CNI_NETNS", "CNI_IFNAME", "CNI_PATH"), without("NETNS", "IFNAME", "PATH")),
    Case("A12", missing("CNI_IFNAME"), {"CNI_IFNAME": ""}),
    *(
        Case("A13", Err(4, BAD_ID, identity), {"CNI_CONTAINERID": identity}, note=note)
        for note, identity in (("percent", "some-%%container-id"),)
    ),
    Case("A14", Err(4, BAD_ID, "-abc"), {"CNI_CONTAINERID": "-abc"}),
    Case("A15", Err(4, BAD_ID, "abc\n"), {"CNI_CONTAINERID": "abc\n"}),
    Case("A16", Err(4, BAD_ID, "café"), {"CNI_CONTAINERID": "café"}),
    Case("A17", Err(4, BAD_ID, "a%b"), {"CNI_CONTAINERID": "a%b", "CNI_NETNS": None}),
    Case("A18", TOO_LONG, {"CNI_IFNAME": "1234567890123456"}),
    Case("A19", ADDED, {"CNI_IFNAME": "123456789012345"}, by=ADDING),
    Case("A19", OK, {"CNI_COMMAND": "DEL", "CNI_IFNAME": "123456789012345"}, note="DEL"),
    *(
        Case("A20", Err(4, "interface name is . or .."), {"CNI_IFNAME": name}, note=name)
        for name in (".", "..")
    ),
    *(
        Case("A21", BAD_NAME, {"CNI_IFNAME": f"test{character}x"}, note=note)
        for note, character in (("slash", "/"), ("colon", ":"), ("space", " "), ("nbsp", "\xa0"))
    ),
    Case("A22", TOO_LONG, {"CNI_IFNAME": "日日日日日日"}),
    Case("A23", OK, {"CNI_COMMAND": "DEL", "CNI_NETNS": None}),
    *each_missing("A24", "DEL", "CONTAINERID", "IFNAME", "PATH"),
    *each_missing("A25", "CHECK", "CONTAINERID", "NETNS", "IFNAME", "PATH"),
    *collecting("A26", NotCode(4), **without("CONTAINERID", "NETNS", "IFNAME", "ARGS")),
    *collecting("A27", missing("CNI_PATH"), **without("PATH")),
    Case(
        "A28",
        OK,
        {"CNI_COMMAND": "GC", "CNI_CONTAINERID": "%%", "CNI_IFNAME": "a/b"},
        AT_1_1,
    ),
]


@table(CASES)
def test_environment(node: Node, case: Case, subject: Subject) -> None:
    outcome = node.run(subject, node.environ(**case.environ), case.stdin(subject))
    case.expected.met_by(outcome)
    if isinstance(case.expected, Err):
        assert node.untouched()


@row("A1")
def test_start_without_cni_command_prints_what_the_plugin_is(node: Node, subject: Subject) -> None:
    outcome = node.run(subject, node.environ(CNI_COMMAND=None))
    assert (outcome.exit_code, outcome.stdout) == (0, b"")
    versions = ", ".join(ALL_VERSIONS)
    assert (
        outcome.stderr == f"{about(node, subject)}\nCNI protocol versions supported: {versions}\n"
    )


@row("A2")
def test_start_without_cni_command_reads_no_standard_input(node: Node, subject: Subject) -> None:
    """The same holds for a variable that is set and empty."""
    outcome = node.run(subject, node.environ(CNI_COMMAND=""), b"")
    assert (outcome.exit_code, outcome.stdout) == (0, b"")
    assert outcome.stderr.startswith(about(node, subject))


def about(node: Node, subject: Subject) -> str:
    """A launcher can describe our own plugins only."""
    stranger = node.through_agent and subject is NOOP
    return f"{subject.name}: a podfabric CNI plugin" if stranger else subject.about


@row("A29", by=EVERY)
def test_variables_of_the_interpreter_change_nothing(
    node: Node, tmp_path: Path, subject: Subject
) -> None:
    """A runtime passes on its whole environment, which may have variables that Python reads."""
    (tmp_path / "trap").mkdir()
    for name in ("json", "msgspec", "sitecustomize", "usercustomize"):
        (tmp_path / "trap" / f"{name}.py").write_text("raise SystemExit(99)\n")
    trap = str(tmp_path / "trap")
    command = "ADD" if subject.adds else "DEL"
    environ = node.environ(
        CNI_COMMAND=command,
        PYTHONPATH=trap,
        PYTHONSTARTUP=f"{trap}/json.py",
        PYTHONHOME=trap,
        PYTHONUSERBASE=trap,
        LD_LIBRARY_PATH=trap,
        LANG="C",
        LC_ALL="C",
    )
    strange = node.run(subject, environ, cwd=Path("/"), umask=0o077)
    assert strange.exit_code == 0, strange
    plain = node.call(subject, command, CNI_CONTAINERID="c2")
    assert strange.document.keys() == plain.document.keys() if subject.adds else not plain.stdout
    # Python must not import from the current directory either.
    (ADDED if subject.adds else OK).met_by(
        node.run(subject, environ | {"CNI_CONTAINERID": "c3"}, cwd=tmp_path / "trap")
    )


@row("A30", by=[NOOP])
def test_trace_context_is_ignored_and_inherited(
    node: Node, delegate: Delegate, subject: Subject
) -> None:
    trace = {"TRACEPARENT": "00-0af7-b7ad-01", "TRACESTATE": "a=b", "BAGGAGE": "c=d"}
    environ = node.environ(**trace)
    ADDED.met_by(node.run(subject, environ, subject.config(ipam={"type": delegate.name})))
    (call,) = delegate.calls
    assert {name: call.environ.get(name) for name in trace} == trace


@row("A30", by=ADDING)
def test_trace_context_is_ignored(node: Node, subject: Subject) -> None:
    ADDED.met_by(node.call(subject, TRACEPARENT="00-0af7-b7ad-01", TRACESTATE="", BAGGAGE="x"))


def test_environment_of_this_machine_does_not_reach_the_executables(node: Node) -> None:
    assert set(node.environ()) & set(os.environ) <= {"PATH"}


@pytest.mark.parametrize("value", [b"c\xff", b"\xc3"])
@row("A16")
def test_container_id_that_is_not_text_is_an_environment_error(
    node: Node, subject: Subject, value: bytes
) -> None:
    outcome = node.call(subject, CNI_CONTAINERID=os.fsdecode(value))
    Err(4, BAD_ID, os.fsdecode(value)).met_by(outcome)
