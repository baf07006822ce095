"""The fallback executable in `.podfabric`: when it is started, and with what."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.framing import MAX_CONFIG
from tests.host.launcher.fake import (
    CONFIG,
    REFUSAL,
    REFUSED,
    RESULT,
    WHOLE,
    Agent,
    Launcher,
    Peer,
    answering,
    file_of,
)
from tests.waiting import PATIENCE

CAT = "#!/bin/sh\necho fallback\nexec cat\n"


def _install(
    launcher: Launcher, content: str = CAT, name: str = "ipoib", mode: int = 0o755
) -> Path:
    script = launcher.executable.parent / ".podfabric" / name
    script.parent.mkdir(exist_ok=True)
    script.write_text(content)
    script.chmod(mode)
    return script


def test_fallback_serves_without_an_agent(launcher: Launcher) -> None:
    _install(launcher)
    outcome = launcher.run(config=b"\0\xff" + CONFIG)
    assert (outcome.exit_code, outcome.stdout) == (0, b"fallback\n\0\xff" + CONFIG)


def _silent(peer: Peer) -> None:
    peer.receive()
    peer.rest()


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(answering(REFUSED), id="refused"),
        pytest.param(answering(b""), id="died"),
        pytest.param(answering(WHOLE[:30]), id="died-halfway"),
        pytest.param(answering(b"x" * 100), id="garbage"),
    ],
)
def test_fallback_replaces_an_unusable_agent(
    launcher: Launcher, act: Callable[[Peer], object]
) -> None:
    _install(launcher)
    with Agent(launcher.socket, act) as agent:
        outcome = launcher.run()
    assert outcome.stdout == b"fallback\n" + CONFIG
    assert agent.served == 1


ARGUMENTS = '#!/bin/sh\nprintf "%s\\n" "$@"\n'


def test_fallback_learns_the_path_of_the_agent_s_socket(launcher: Launcher) -> None:
    _install(launcher, ARGUMENTS)
    told = f"--socket={launcher.socket}\n".encode()
    assert launcher.run().stdout == told
    with Agent(launcher.socket, answering(REFUSED)):
        assert launcher.run().stdout == told


@pytest.mark.parametrize("bytes_", [b"", WHOLE[:30], b"x" * 100])
def test_fallback_learns_since_when_an_agent_may_have_done_the_call(
    launcher: Launcher, bytes_: bytes
) -> None:
    _install(launcher, ARGUMENTS)
    before = int(time.time())
    with Agent(launcher.socket, answering(bytes_)):
        socket, since = launcher.run().stdout.decode().splitlines()
    assert socket == f"--socket={launcher.socket}"
    name, _, seconds = since.partition("=")
    assert name == "--unanswered-since"
    # The launcher's time(2) is behind by up to a tick.
    assert before - 1 <= int(seconds) <= time.time()


def test_fallback_is_not_started_where_an_agent_answers(launcher: Launcher) -> None:
    _install(launcher)
    with Agent(launcher.socket, answering(WHOLE)):
        assert launcher.run().stdout == RESULT


def test_fallback_is_not_started_while_the_agent_may_be_at_work(launcher: Launcher) -> None:
    _install(launcher)
    with Agent(launcher.socket, _silent):
        outcome = launcher.run(launcher.environ(PODFABRIC_TIMEOUT="1"))
    assert "may still be at work" in outcome.error["msg"]


def test_fallback_serves_if_the_agent_did_not_take_the_request(launcher: Launcher) -> None:
    _install(launcher)
    config = b"x" * (8 << 20)
    ended = threading.Event()
    with Agent(launcher.socket, lambda _: ended.wait(PATIENCE)), file_of(config) as stdin:
        outcome = launcher.run(launcher.environ(PODFABRIC_TIMEOUT="1"), stdin=stdin)
        ended.set()
    assert outcome.stdout == b"fallback\n" + config


def test_fallback_of_a_link_is_beside_its_target(launcher: Launcher, directory: Path) -> None:
    _install(launcher, name="podfabric-ipam")
    (directory / "podfabric-ipam").symlink_to(launcher.executable)
    outcome = Launcher(directory / "podfabric-ipam", launcher.socket).run()
    assert outcome.stdout == b"fallback\n" + CONFIG


def test_fallback_of_another_name_is_not_started(launcher: Launcher) -> None:
    _install(launcher, name="podfabric-ipam")
    assert "cannot be reached" in launcher.run().error["msg"]


def test_fallback_has_the_environment_and_no_other_descriptors(launcher: Launcher) -> None:
    script = "#!/bin/sh\necho $STRANGE\nls /proc/self/fd\ngrep SigIgn /proc/self/status\n"
    _install(launcher, script)
    with Agent(launcher.socket, answering(b"")):
        outcome = launcher.run(
            launcher.environ(
                STRANGE=b"\xff", CNI_NETNS="/proc/self/ns/net", PATH=os.environ["PATH"]
            )
        )
    # 3 is the directory that ls reads. The launcher ignored SIGPIPE only, and resets that.
    *seen, ignored = outcome.stdout.splitlines()
    assert seen == [b"\xff", b"0", b"1", b"2", b"3"]
    assert not int(ignored.split()[1], 16) & 1 << (signal.SIGPIPE - 1)


def test_fallback_gets_the_unreadable_standard_input(launcher: Launcher) -> None:
    _install(launcher, "#!/bin/sh\nexec cat\n")
    for path, flags, said in (("/", 0, b"Is a directory"), (os.devnull, 1, b"Bad file descriptor")):
        descriptor = os.open(path, flags)
        outcome = launcher.run(launcher.environ(PATH=os.environ["PATH"]), stdin=descriptor)
        os.close(descriptor)
        assert outcome.exit_code == 1
        assert said in outcome.stderr


def test_fallback_gets_the_closed_standard_input(launcher: Launcher) -> None:
    _install(launcher, "#!/bin/sh\ntest -e /proc/$$/fd/0 || echo closed\n")
    outcome = launcher.run(stdin=None, preexec_fn=lambda: os.close(0))
    assert outcome.stdout == b"closed\n"


def test_fallback_sees_that_a_configuration_is_too_long(launcher: Launcher) -> None:
    _install(launcher, "#!/bin/sh\nexec wc -c\n")
    environ = launcher.environ(PATH=os.environ["PATH"])
    outcome = launcher.run(environ, config=b"x" * (MAX_CONFIG + 100))
    assert int(outcome.stdout) == MAX_CONFIG + 1


@pytest.mark.parametrize(
    ("content", "mode", "word"),
    [
        (CAT, 0o644, "EACCES, errno 13"),
        ("#!/nowhere/python3\n", 0o755, "ENOENT, errno 2"),
        ("no program", 0o755, "ENOEXEC, errno 8"),
    ],
)
def test_fallback_that_cannot_be_run_is_an_error(
    launcher: Launcher, content: str, mode: int, word: str
) -> None:
    script = _install(launcher, content, mode=mode)
    message = launcher.run().error["msg"]
    assert "cannot be reached (ENOENT, errno 2)" in message
    assert message.endswith(f'; the fallback "{script}" cannot be run ({word})')


def test_refusal_is_printed_if_the_fallback_cannot_be_run(launcher: Launcher) -> None:
    _install(launcher, mode=0o644)
    with Agent(launcher.socket, answering(REFUSED)):
        assert launcher.run().stdout == REFUSAL


def test_executable_that_is_replaced_during_the_call_finds_its_fallback(launcher: Launcher) -> None:
    _install(launcher)

    def act(peer: Peer) -> None:
        peer.receive()
        new = shutil.copy(launcher.executable, launcher.executable.with_name("new"))
        Path(new).replace(launcher.executable)

    with Agent(launcher.socket, act):
        assert launcher.run().stdout == b"fallback\n" + CONFIG
