"""Tables C and D: the version of the configuration, and VERSION."""

import subprocess
from collections.abc import Mapping

from tests.conformance.expect import ADDED, Added, Err
from tests.conformance.node import Node
from tests.conformance.rows import Case, row, table
from tests.conformance.subject import ADDING, ALL_VERSIONS, EVERY, NOOP, Subject
from tests.waiting import PATIENCE

SUPPORTED = " ".join(f'"{version}"' for version in ALL_VERSIONS)
CHECK = {"CNI_COMMAND": "CHECK"}
LISTED: dict[str, object] = {"cni.dev/valid-attachments": []}
OLD_NOOP = {"NOOP": '{"versions":["0.1.0","0.2.0","0.3.0"]}'}


def incompatible(version: str, supported: str = SUPPORTED) -> Err:
    details = f'config is "{version}", plugin supports [{supported}]'
    return Err(1, "incompatible CNI versions", details)


def later(
    row_name: str,
    message: str,
    version: str,
    environ: Mapping[str, str | None] | None = None,
    by: tuple[Subject, ...] = EVERY,
    code: int = 1,
) -> list[Case]:
    """GC and STATUS at a version."""
    cases = []
    for command in ("GC", "STATUS"):
        expected = Err(1, f"{message} {command}") if code == 1 else Err(code, contains=message)
        changes = {**(environ or {}), "CNI_COMMAND": command}
        config = {"cniVersion": version, **LISTED}
        cases.append(Case(row_name, expected, changes, config, by=by, note=f"{command}-{version}"))
    return cases


CASES = [
    Case("C1", Added("0.1.0"), config={"cniVersion": None}, by=ADDING),
    Case("C2", Added("0.1.0"), config={"cniVersion": ""}, by=ADDING),
    Case(
        "C3",
        incompatible("0.1.0", '"4.3.2"'),
        {"NOOP": '{"versions":["4.3.2"]}'},
        {"cniVersion": None},
        by=[NOOP],
    ),
    Case("C4", incompatible("9.9.9"), config={"cniVersion": "9.9.9"}),
    *(
        Case(
            row_name,
            incompatible(version),
            {"CNI_COMMAND": command},
            {"cniVersion": version},
            note=command,
        )
        for row_name, version in (("C5", "1.0"), ("C6", "adsf"))
        for command in ("ADD", "DEL")
    ),
    *(
        Case(
            "C7",
            Err(6, contains='"cniVersion": Expected'),
            {"CNI_COMMAND": command},
            {"cniVersion": 1},
            note=command,
        )
        for command in ("ADD", "DEL", "CHECK", "GC", "STATUS")
    ),
    *(
        Case(
            "C8",
            Err(1, "config version does not allow CHECK"),
            CHECK,
            {"cniVersion": version},
            note=str(version),
        )
        for version in ("0.3.1", "0.3.0", None)
    ),
    Case(
        "C9",
        Err(1, "plugin version does not allow CHECK"),
        {**CHECK, **OLD_NOOP},
        {"cniVersion": "0.4.0"},
        by=[NOOP],
    ),
    Case("C10", Err(6, contains="adsf"), CHECK, {"cniVersion": "adsf"}),
    Case(
        "C11",
        Err(6, 'invalid version "1.2.3.4": too many parts'),
        CHECK,
        {"cniVersion": "1.2.3.4"},
    ),
    Case("C12", Err(1, "plugin version does not allow CHECK"), CHECK, {"cniVersion": "9.9.9"}),
    Case("C13", incompatible("0.5.0"), CHECK, {"cniVersion": "0.5.0"}),
    *later("C14", "config version does not allow", "0.3.0"),
    *later("C14", "config version does not allow", "1.0.0"),
    *later("C15", "plugin version does not allow", "1.1.0", {**OLD_NOOP}, by=(NOOP,)),
    *later("C16", "plugin version does not allow", "2.0.0"),
    *later("C17", "adsf", "adsf", code=6),
]


@table(CASES)
def test_configuration_version(node: Node, case: Case, subject: Subject) -> None:
    outcome = node.run(subject, node.environ(**case.environ), case.stdin(subject))
    case.expected.met_by(outcome)
    if isinstance(case.expected, Err):  # C18: the verb must not have run
        assert node.untouched()


@row("C18", by=[NOOP])
def test_verb_that_runs_leaves_a_trace(node: Node, subject: Subject) -> None:
    """C18 in the table above relies on this."""
    ADDED.met_by(node.call(subject))
    assert not node.untouched()


VERSION_ONLY = {"CNI_COMMAND": "VERSION", "PATH": "/usr/bin:/bin"}
ANSWER = {"cniVersion": "1.1.0", "supportedVersions": list(ALL_VERSIONS)}


@row("D1")
def test_version_is_answered(node: Node, subject: Subject) -> None:
    outcome = node.run(subject, VERSION_ONLY, b'{"cniVersion":"1.1.0"}')
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    assert outcome.document == ANSWER


@row("D2")
def test_version_does_not_read_standard_input(node: Node, subject: Subject) -> None:
    for stdin in (b"", b"garbage"):
        outcome = node.run(subject, VERSION_ONLY, stdin)
        assert (outcome.exit_code, outcome.document) == (0, ANSWER)
    with node.start(subject, VERSION_ONLY) as process:
        try:
            assert process.wait(timeout=PATIENCE) == 0  # its standard input is open until the end
        finally:
            process.kill()


@row("D3")
def test_version_does_not_look_at_other_variables(node: Node, subject: Subject) -> None:
    outcome = node.run(subject, {**VERSION_ONLY, "CNI_CONTAINERID": "%%"}, b"x")
    assert (outcome.exit_code, outcome.document) == (0, ANSWER)


@row("D4")
def test_version_as_libcni_asks_for_it(node: Node, subject: Subject) -> None:
    dummies = dict.fromkeys(("CNI_NETNS", "CNI_IFNAME", "CNI_PATH"), "dummy")
    outcome = node.run(subject, {**VERSION_ONLY, **dummies}, b'{"cniVersion":"1.1.0"}')
    assert (outcome.exit_code, outcome.document) == (0, ANSWER)


@row("D5")
def test_version_answers_the_newest_version_to_any_request(node: Node, subject: Subject) -> None:
    outcome = node.run(subject, VERSION_ONLY, b'{"cniVersion":"0.2.0"}')
    assert outcome.document["cniVersion"] == "1.1.0"


@row("D6")
def test_version_touches_no_file_and_imports_no_library(node: Node, subject: Subject) -> None:
    """bench/ measures the time."""
    environ = node.environ(CNI_COMMAND="VERSION")
    executable = node.executable(subject)
    first_line = executable.read_bytes()[:200].split(b"\n")[0].decode(errors="ignore")
    script = first_line.startswith("#!")
    command = [*first_line[2:].split(), "-X", "importtime", str(executable)] if script else []
    done = subprocess.run(
        command or [str(executable)],
        env=environ,
        check=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert ("cni.spec.entry" in imported) is script
    assert not imported & {"msgspec", "json", "re", "typing", "socket", "pyroute2", "sqlite3"}
    assert not node.state.exists()
