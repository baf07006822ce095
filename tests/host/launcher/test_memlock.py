"""The launcher as the hook podfabric-memlock, on real processes and hostile states."""

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deviceplugin.allocate.memlock import HOOK
from tests.host.launcher.fake import Outcome

SOFT, HARD = 64 << 10, 1 << 20
ALL = str(HARD)


@pytest.fixture
def pid() -> Iterator[int]:
    """A process whose soft limit anybody may raise."""
    with subprocess.Popen(["sleep", "600"]) as process:
        resource.prlimit(process.pid, resource.RLIMIT_MEMLOCK, (SOFT, HARD))
        yield process.pid
        process.kill()


@pytest.fixture
def hook(directory: Path, built: Path) -> Path:
    return Path(shutil.copy(built, directory / HOOK))


def _run(hook: Path, state: str, *arguments: str) -> Outcome:
    given = state.encode(errors="surrogatepass")
    done = subprocess.run([hook, *arguments], input=given, capture_output=True, check=False)
    return Outcome(done.returncode, done.stdout, done.stderr)


def _limit(pid: int) -> tuple[int, int]:
    return resource.prlimit(pid, resource.RLIMIT_MEMLOCK)


def _refused(outcome: Outcome, words: bytes) -> None:
    assert (outcome.exit_code, outcome.stdout) == (0, b"")
    assert outcome.stderr.startswith(f"{HOOK}: ".encode())
    assert words in outcome.stderr
    assert outcome.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    "state",
    [
        '{"ociVersion":"1.2.0","id":"c","status":"creating","pid":PID,"bundle":"/b"}',
        ' {\n "pid" :\tPID }\n',
        '{"annotations":{"pid":1},"list":[{"pid":2},"pid"],"pid":PID}',
        '{"id":"pid","a":"\\"pid\\":3,","b":"\\\\","pid":PID}',
        '{"a":"\\\\\\"},{\\"pid\\":4","é":"}","pid":PID,"pid":5}',
    ],
)
def test_the_outermost_pid_gets_the_limit(hook: Path, pid: int, state: str) -> None:
    assert _run(hook, state.replace("PID", str(pid)), ALL) == Outcome(0, b"", b"")
    assert _limit(pid) == (HARD, HARD)


@pytest.mark.parametrize(
    "state",
    [
        "", "{}", "null", "PID", '"pid":PID', '[{"pid":PID}]', '{"annotations":{"pid":PID}}',
        '{"a":"\\"},\\"pid\\":PID}', '{"a":"{\\"pid\\":PID}"}', '{"PID":PID,"pid ":PID,"ppid":PID}',
        '{"p\\u0069d":PID}', '{"pid":"PID"}', '{"pid":-1}', '{"pid":-PID}', '{"pid":+PID}',
        '{"pid":0}', '{"pid":1}', '{"pid":PID.0}', '{"pid":PIDe0}', '{"pid":0xPID}',
        '{"pid":4194305}', '{"pid":18446744073709551616}', '{"pid":PID', '{"pid":PID ', '{"pid":',
        '{"pid"', '{"pid', '{"a":"\\', '{"pid":{"pid":PID}}', '}{"pid":PID}', '{}{"pid":PID}',
        "[" * 100_000, "{" * (1 << 20), '{"a":"' + "x" * (1 << 20) + '","pid":PID}',
        '{"pid":PID,"a":"' + "x" * (1 << 20) + '"}', '\0{"pid":PID}', '{"pid":\0PID}', "\ud880{",
    ],
)  # fmt: skip
def test_a_state_without_a_valid_pid_changes_nothing(hook: Path, pid: int, state: str) -> None:
    own = _limit(0)
    words = b"standard input has no container state with a pid, or has 1 MiB or more\n"
    _refused(_run(hook, state.replace("PID", str(pid)), ALL), words)
    assert _limit(pid) == (SOFT, HARD)
    assert _limit(0) == own


@pytest.mark.parametrize("value", ["0", "4096", str(SOFT)])
def test_a_limit_is_never_lowered(hook: Path, pid: int, value: str) -> None:
    assert _run(hook, json.dumps({"pid": pid}), value) == Outcome(0, b"", b"")
    assert _limit(pid) == (SOFT, HARD)


@pytest.mark.parametrize(
    "arguments", [(), (ALL, ALL), ("",), ("-1",), ("64Gi",), ("Unlimited",), ("9" * 30 + "x",)]
)
def test_other_arguments_change_nothing(hook: Path, pid: int, arguments: tuple[str, ...]) -> None:
    """A definition with this CNI type starts the hook without an argument."""
    words = b"expected one argument: a number of bytes, or unlimited\n"
    _refused(_run(hook, json.dumps({"pid": pid}), *arguments), words)
    assert _limit(pid) == (SOFT, HARD)


def test_an_unreadable_state_is_told(hook: Path, directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    done = subprocess.run([hook, ALL], stdin=descriptor, capture_output=True, check=False)
    os.close(descriptor)
    _refused(Outcome(done.returncode, done.stdout, done.stderr), b"read (EISDIR, errno 21)")


def test_a_process_that_has_ended_is_told(hook: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    _refused(_run(hook, json.dumps({"pid": ended.pid}), "unlimited"), b"(ESRCH, errno 3)")


def test_what_the_kernel_refuses_is_told(hook: Path, pid: int) -> None:
    hook.chmod(0o755)
    without = ["setpriv", "--bounding-set=-sys_resource", "--inh-caps=-sys_resource", str(hook)]
    done = subprocess.run(
        [*without, "unlimited"], input=b'{"pid":%d}' % pid, capture_output=True, check=False
    )
    _refused(Outcome(done.returncode, done.stdout, done.stderr), b"raised (EPERM, errno 1)")
    assert _limit(pid) == (SOFT, HARD)
