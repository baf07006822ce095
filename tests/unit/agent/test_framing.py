"""Launcher and agent understand each other, and no bytes can do harm."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.serve import framing
from agent.serve.framing import (
    ANSWER_MAGIC,
    ANSWERED,
    HEADER,
    MAX_CONFIG,
    MAX_ENVIRON,
    MAX_NAME,
    MAX_STDERR,
    REFUSED,
    REQUEST_MAGIC,
    BadFrame,
    LauncherRequest,
    RequestHeader,
)
from tests.frames import write_request

NUMBERS = st.integers(0, 2**32 - 1)


def no_nul(text: str) -> bool:
    return "\0" not in text


# As execve(2) passes it on: any bytes except NUL, undecodable ones as surrogates.
ANY_TEXT = st.binary(max_size=40).map(lambda raw: raw.decode(errors="surrogateescape"))
VALUES = ANY_TEXT.filter(no_nul)
NAMES = VALUES.filter(lambda text: "=" not in text)
REQUESTS = st.builds(
    LauncherRequest,
    name=ANY_TEXT,
    environ=st.dictionaries(NAMES, VALUES, max_size=6),
    config=st.binary(max_size=200),
    stdin_errno=NUMBERS,
)


def read(frame: bytes) -> LauncherRequest:
    return framing.read_request(framing.read_header(frame[: HEADER.size]), frame[HEADER.size :])


@given(REQUESTS)
def test_a_request_comes_out_as_it_went_in(request: LauncherRequest) -> None:
    frame = write_request(request)
    assert framing.read_header(frame[: HEADER.size]).total == len(frame)
    assert read(frame) == request


@given(st.binary(min_size=HEADER.size, max_size=300))
def test_any_bytes_are_a_request_or_a_bad_frame(frame: bytes) -> None:
    try:
        read(frame)
    except BadFrame as bad:
        assert str(bad).startswith("the request begins with ")


@given(NUMBERS, NUMBERS, NUMBERS, NUMBERS)
def test_lengths_are_within_their_limits_or_a_bad_frame(
    name: int, environ: int, config: int, stdin_errno: int
) -> None:
    within = name <= MAX_NAME and environ <= MAX_ENVIRON and config <= MAX_CONFIG
    head = HEADER.pack(REQUEST_MAGIC, name, environ, config, stdin_errno)
    if within:
        assert framing.read_header(head) == RequestHeader(name, environ, config, stdin_errno)
        return
    with pytest.raises(BadFrame, match="at most"):
        framing.read_header(head)


@given(st.binary(max_size=300), st.integers(0, MAX_NAME), st.integers(0, 300), st.integers(0, 300))
def test_any_body_is_a_request(body: bytes, name: int, environ: int, config: int) -> None:
    request = framing.read_request(RequestHeader(name, environ, config, 0), body)
    assert all("\0" not in key + value and "=" not in key for key, value in request.environ.items())


@pytest.mark.parametrize(
    ("lengths", "what"),
    [
        ((MAX_NAME + 1, 0, 0), "plugin's name"),
        ((0, MAX_ENVIRON + 1, 0), "environment"),
        ((0, 0, MAX_CONFIG + 1), "configuration"),
    ],
)
def test_the_limits_are_where_they_are_said_to_be(lengths: tuple[int, int, int], what: str) -> None:
    framing.read_header(HEADER.pack(REQUEST_MAGIC, MAX_NAME, MAX_ENVIRON, MAX_CONFIG, 0))
    with pytest.raises(BadFrame, match=f"the {what} has {max(lengths)} bytes"):
        framing.read_header(HEADER.pack(REQUEST_MAGIC, *lengths, 0))


def test_an_answer_is_no_request() -> None:
    with pytest.raises(BadFrame, match="pfa1"):
        framing.read_header(framing.write_answer(ANSWERED, 0, b"", b"")[: HEADER.size])


def test_of_two_variables_of_a_name_the_first_counts() -> None:
    body = b"A=1\0A=2\0B\0=3\0C=\0"
    request = framing.read_request(RequestHeader(0, len(body), 0, 0), body)
    assert request.environ == {"A": "1", "": "3", "C": ""}


@given(
    st.sampled_from((ANSWERED, REFUSED)),
    st.integers(0, 255),
    st.binary(max_size=99),
    st.binary(max_size=99),
)
def test_an_answer_says_how_long_its_parts_are(
    status: int, exit_code: int, stderr: bytes, stdout: bytes
) -> None:
    frame = framing.write_answer(status, exit_code, stderr, stdout)
    head = struct.unpack("!4s4I", frame[:20])
    assert head == (ANSWER_MAGIC, status, exit_code, len(stderr), len(stdout))
    assert frame[20:] == stderr + stdout


def test_of_a_standard_error_that_is_too_long_the_end_is_sent() -> None:
    frame = framing.write_answer(ANSWERED, 1, b"a" * MAX_STDERR + b"end", b"{}")
    assert len(frame) == HEADER.size + MAX_STDERR + 2
    assert frame.endswith(b"aend{}")
