"""One call in an agent: always an answer that a launcher takes, and lines that stay short."""

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from agent.serve import framing
from agent.serve.calls import MAX_LINES, Calls
from agent.serve.framing import HEADER, LauncherRequest
from base.interrupts import Call
from cni.spec.errors import CNIError
from cni.spec.notes import note
from tests.plugins.noop import Noop

ENVIRON = {
    "CNI_COMMAND": "DEL",
    "CNI_CONTAINERID": "c1",
    "CNI_IFNAME": "eth0",
    "CNI_PATH": "/none",
    "PODFABRIC_STATE": "/none",
}
CONFIG = b'{"cniVersion":"1.0.0","name":"n1"}'


class Does(Noop):
    """A plugin whose DEL is a function, and whose ADD answers what it returns."""

    def __init__(self, does: Callable[[], object]) -> None:
        super().__init__(ENVIRON)
        self._does = does

    def add(self, request: object) -> dict[str, Any]:
        document = self._does()
        assert isinstance(document, dict)
        return document

    def delete(self, request: object) -> None:
        self._does()


class Counted:
    """The observed values."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, int]] = []

    def observe(self, plugin: str, verb: str, code: int, seconds: float) -> None:
        self.seen.append((plugin, verb, code))


def called(
    does: Callable[[], object], name: str = "noop", more: Mapping[str, str] | None = None
) -> tuple[int, bytes, bytes, list[tuple[str, str, int]]]:
    """Exit code, standard error and standard output of one call, and the counters."""
    counted = Counted()
    calls = Calls({"noop": lambda environ: Does(does)}, counted.observe)
    request = LauncherRequest(name, {**ENVIRON, **(more or {})}, CONFIG)
    frame = calls.call(request, None, Call(endable=False))
    _, status, exit_code, stderr, _ = HEADER.unpack(frame[: HEADER.size])
    assert status == framing.ANSWERED
    body = frame[HEADER.size :]
    return exit_code, body[:stderr], body[stderr:], counted.seen


def fail(text: str) -> None:
    raise CNIError(103, text)


def test_success_is_counted_as_code_0() -> None:
    assert called(lambda: None) == (0, b"", b"", [("noop", "DEL", 0)])


def test_error_is_counted_by_its_code_and_notes_come_along() -> None:
    def does() -> None:
        note("seen")
        fail("no")

    exit_code, stderr, stdout, seen = called(does)
    assert (exit_code, stderr, seen) == (1, b"seen\n", [("noop", "DEL", 103)])
    assert json.loads(stdout)["msg"] == "[podfabric 103] no"


def test_unknown_plugin_is_told_what_there_is() -> None:
    exit_code, _, stdout, _ = called(lambda: None, name="other")
    assert exit_code == 1
    assert 'no plugin "other" (it has noop)' in json.loads(stdout)["msg"]


def test_environment_that_is_no_text_is_answered() -> None:
    exit_code, _, stdout, _ = called(lambda: None, more={"CNI_CONTAINERID": "c\udcff"})
    assert (exit_code, json.loads(stdout)["code"]) == (1, 4)


@pytest.mark.parametrize("since", ["", "x", "-1", "²", "9" * 5000])
def test_time_that_no_launcher_tells_is_ignored(since: str) -> None:
    exit_code, _, _, _ = called(lambda: None, more={"PODFABRIC_UNANSWERED_SINCE": since})
    assert exit_code == 0


def test_answer_that_no_launcher_would_take_is_an_error_that_one_takes() -> None:
    more = {"CNI_COMMAND": "ADD", "CNI_NETNS": "/none"}
    large = {"x": "x" * framing.MAX_STDOUT}
    exit_code, _, stdout, _ = called(lambda: large, more=more)
    assert exit_code == 1
    assert len(stdout) < 1000
    assert "at most 16777216 are allowed" in json.loads(stdout)["msg"]


def test_log_is_bounded_whatever_a_call_says(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        _, stderr, _, _ = called(lambda: note("line\n\n" * 1000))
    assert stderr.count(b"line") == 1000
    assert len(caplog.records) == MAX_LINES + 2
    assert "(950 more lines" in caplog.text


def test_long_error_is_cut_in_the_log_and_in_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        _, _, stdout, _ = called(lambda: fail("x " * 100_000))
    assert 3000 < len(json.loads(stdout)["msg"]) < 5000
    assert max(len(entry.getMessage()) for entry in caplog.records) < 5000
