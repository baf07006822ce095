"""The launcher of another architecture, as an emulated process."""

import shutil
from pathlib import Path

import pytest

from agent.serve import framing
from tests.host.launcher.fake import CONFIG, RESULT, Agent, Launcher, Recorder
from tools import build_launcher

TARGET = "aarch64-linux-gnu"
THROUGH = ("qemu-aarch64",)


@pytest.fixture
def arm64(directory: Path) -> Launcher:
    built = build_launcher.build(TARGET)
    assert built.stat().st_size < 1 << 20
    return Launcher(Path(shutil.copy(built, directory / "ipoib")), directory / "agent.sock")


def test_executable_is_made_for_it(arm64: Launcher) -> None:
    machine = arm64.executable.read_bytes()[18:20]
    assert int.from_bytes(machine, "little") == 183  # EM_AARCH64


def test_version_is_answered(arm64: Launcher) -> None:
    outcome = arm64.run({"CNI_COMMAND": "VERSION"}, through=THROUGH)
    assert (outcome.exit_code, outcome.stderr) == (0, b"")
    assert outcome.stdout.startswith(b'{"cniVersion":"1.1.0","supportedVersions":["0.1.0",')


def test_absent_agent_is_an_error(arm64: Launcher) -> None:
    outcome = arm64.run(arm64.environ(), through=THROUGH)
    assert outcome.error["code"] == 11
    assert "cannot be reached (ENOENT, errno 2)" in outcome.error["msg"]


def test_answer_is_printed(arm64: Launcher) -> None:
    recorder = Recorder(framing.write_answer(framing.ANSWERED, 3, b"noted", RESULT))
    environ = arm64.environ(CNI_NETNS="/proc/self/ns/net")
    with Agent(arm64.socket, recorder):
        outcome = arm64.run(environ, CONFIG, through=THROUGH)
    assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (3, RESULT, b"noted")
    assert recorder.request is not None
    assert (recorder.request.name, recorder.request.config) == ("ipoib", CONFIG)
    assert recorder.peer is not None
    assert recorder.peer.netns is not None
