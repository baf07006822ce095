"""The log: one line an event, which says whose call it is, and which no caller can forge."""

import json
import logging
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from agent.observe import logs
from agent.observe.logs import fields
from agent.settings import Settings
from tests.waiting import PATIENCE

TEXT = Settings()
JSON = Settings(log_format="json")
LOG = logging.getLogger("agent.test")


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """The root logger, restored after each test."""
    root = logging.getLogger()
    handlers, level, raising = set(root.handlers), root.level, logging.raiseExceptions
    yield
    for handler in set(root.handlers) - handlers:
        root.removeHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(False)
    logging.raiseExceptions = raising


class Output:
    """The lines of the log."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def lines(self) -> list[str]:
        return self._capture.readouterr().err.split("\n")[:-1]


@pytest.fixture
def output(capsys: pytest.CaptureFixture[str]) -> Output:
    return Output(capsys)


def test_a_line_has_time_level_message_and_call(output: Output) -> None:
    logs.configure(TEXT)
    with fields(
        request=7,
        plugin="ipoib",
        verb="ADD",
        container_id="cid",
        ifname="eth0",
        network="net",
        pod="default/web",
    ):
        LOG.info("done in %.1f ms", 3.14)
    LOG.warning("outside")
    inside, outside = output.lines()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO done in 3\.1 ms  request=7 plugin=ipoib "
        r"verb=ADD pod=default/web attachment=net/cid/eth0",
        inside,
    )
    assert outside.endswith("Z WARNING outside")


def test_json_has_one_object_a_line(output: Output) -> None:
    logs.configure(JSON)
    with fields(network="net", container_id="cid", ifname="eth0", level="forged", verb=""):
        LOG.error("a\nb")
    (line,) = output.lines()
    found = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.pop("time"))
    assert found == {
        "level": "error",
        "message": "a\nb",
        "logger": "agent.test",
        "network": "net",
        "container_id": "cid",
        "ifname": "eth0",
    }


def test_a_call_without_a_whole_attachment_shows_what_it_has(output: Output) -> None:
    logs.configure(TEXT)
    with fields(network="net", container_id="", verb="GC"):
        LOG.info("x")
    assert output.lines()[0].endswith(" INFO x  network=net verb=GC")


def test_fields_add_up_and_end_with_their_block(output: Output) -> None:
    logs.configure(TEXT)
    with fields(verb="ADD"):
        with fields(pod="a/b"):
            LOG.info("both")
        LOG.info("one")
    LOG.info("none")
    both, first, none = output.lines()
    assert both.endswith("both  verb=ADD pod=a/b")
    assert first.endswith("one  verb=ADD")
    assert none.endswith("none")


def test_two_threads_have_fields_of_their_own(output: Output) -> None:
    logs.configure(TEXT)
    barrier = threading.Barrier(2)

    def call(number: int) -> None:
        with fields(request=number):
            barrier.wait(PATIENCE)
            LOG.info("from %d", number)
            barrier.wait(PATIENCE)

    threads = [threading.Thread(target=call, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    found = sorted(line.partition(" INFO ")[2] for line in output.lines())
    assert found == ["from 1  request=1", "from 2  request=2"]


@given(st.text(max_size=30), st.text(max_size=30))
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_text_makes_a_second_line(output: Output, message: str, value: str) -> None:
    # Those of pytest: its report must not hold what cannot be encoded.
    logging.getLogger().handlers.clear()
    for given_settings in (TEXT, JSON):
        logs.configure(given_settings)
        with fields(pod=value):
            LOG.info("%s", message + "\n2026-01-02T03:04:05.678Z ERROR forged\r\x1b[2K\u2028\udc80")
        (line,) = output.lines()
        assert line.isprintable()


def test_a_tracebacks_lines_cannot_be_taken_for_others(output: Output) -> None:
    def fail() -> None:
        raise ValueError("first\n2026-01-02T03:04:05.678Z ERROR forged")

    logs.configure(TEXT)
    try:
        fail()
    except ValueError:
        LOG.exception("it failed")
    first, *others = output.lines()
    assert first.endswith("ERROR it failed")
    assert len(others) > 2
    assert all(line.startswith("    ") for line in others)
    logs.configure(JSON)
    try:
        fail()
    except ValueError:
        LOG.exception("it failed")
    (line,) = output.lines()
    assert "ValueError: first" in json.loads(line)["traceback"]


def test_new_settings_take_effect_without_a_second_handler(output: Output) -> None:
    logs.configure(TEXT)
    LOG.debug("unseen")
    logs.configure(Settings(log_level="debug", log_format="json"))
    LOG.debug("seen")
    logging.getLogger("asyncio").debug("a library's own")
    logs.configure(Settings(log_level="error"))
    LOG.warning("unseen")
    (line,) = output.lines()
    assert json.loads(line)["message"] == "seen"


def test_warnings_of_libraries_are_lines_of_the_log(output: Output) -> None:
    logs.configure(TEXT)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)  # within what the block restores
        warnings.warn("this is old", DeprecationWarning, stacklevel=1)
        logging.captureWarnings(False)
    (line,) = output.lines()
    assert " WARNING " in line
    assert "DeprecationWarning: this is old" in line


def test_arguments_that_do_not_fit_do_not_lose_the_line(output: Output) -> None:
    logs.configure(TEXT)
    LOG.info("%d", "text")
    assert output.lines()[0].endswith("INFO %d ('text',)")


def test_a_closed_standard_error_ends_nothing() -> None:
    script = (
        "import logging, os; from agent.observe import logs; from agent.settings import Settings\n"
        "logs.configure(Settings()); os.close(2)\n"
        "logging.error('x'); os.write(1, b'alive')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, timeout=PATIENCE, check=False
    )
    assert done.stdout == b"alive"


@pytest.mark.parametrize("given_settings", [TEXT, JSON])
def test_a_record_is_bounded_whatever_is_logged(output: Output, given_settings: Settings) -> None:
    logs.configure(given_settings)
    large = "\U0001f600\n" * (1 << 19)
    with fields(network=large):
        try:
            raise ValueError(large)
        except ValueError:
            LOG.exception("it failed: %s, see the end", large)
    lines = output.lines()
    assert sum(map(len, lines)) < 12 * (logs.MAX_MESSAGE + logs.MAX_TRACEBACK + logs.MAX_FIELD)
    assert "see the end" in lines[0]
    assert "Traceback (most recent call last)" in "".join(lines)


def test_no_text_makes_a_field_of_a_call(output: Output) -> None:
    logs.configure(TEXT)
    with fields(pod='x\\" verb=DEL y="', verb="ADD"):
        LOG.info("failed  request=9 plugin=ipoib")
    (line,) = output.lines()
    message, _, shown = line.partition("  ")
    assert message.endswith("INFO failed request=9 plugin=ipoib")
    assert shown == r'pod="x\\\" verb=DEL y=\"" verb=ADD'
