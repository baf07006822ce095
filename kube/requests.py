"""Sends requests to the API server, limits their rate, and repeats reads.

A change is sent once. If its answer is lost, the server may have made the change.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from base import interrupts
from base.loop import Backoff
from kube import encoding
from kube.resources import (
    AlreadyExists,
    ApiError,
    Conflict,
    NotFound,
    Refused,
    Unavailable,
    WatchExpired,
)

RATE = 20.0  # requests a second
BURST = 40
LONGEST_PAUSE = 30.0  # seconds; the longest pause that a server can request


class Pace:
    """Lets a client's threads send `burst` requests at once, then `rate` requests a second."""

    def __init__(
        self,
        rate: float = RATE,
        burst: int = BURST,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._interval = 1 / rate
        self._allowance = (burst - 1) / rate
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._full_at = clock()  # when the bucket is full again
        self._paused_until = clock()

    def turn(self, patience: float) -> bool:
        """Wait for permission to send. Returns False at once if the wait exceeds `patience`
        seconds.
        """
        with self._lock:
            now = self._clock()
            full_at = max(now, self._full_at)
            wait = max(full_at - self._allowance, self._paused_until) - now
            if wait > patience:
                return False
            self._full_at = full_at + self._interval
        if wait > 0:
            self._sleep(wait)
        return True

    def pause(self, seconds: float) -> None:
        """Delay all requests by `seconds`, as the server requested (Retry-After)."""
        with self._lock:
            until = self._clock() + min(seconds, LONGEST_PAUSE)
            self._paused_until = max(self._paused_until, until)


TIMEOUT = 10.0  # seconds for a call with all its attempts, or for a page of a LIST
FIRST_BACKOFF, LONGEST_BACKOFF = 0.2, 5.0
LEAST_PAGE = 16  # objects of unknown size in a page, at least
RESTARTS = 3  # of a LIST, if its pages expire while they are read

_REFUSALS = frozenset({400, 401, 403, 405, 406, 413, 415, 422})

T = TypeVar("T")
Query = Sequence[tuple[str, str]]
Body = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""A document. For a PATCH, the operations of a JSON patch."""


class AnswerTooLarge(ApiError):
    """An answer is larger than allowed. The client has not read all of it."""


class RestRequest(NamedTuple):
    method: str
    where: str
    query: Query = ()
    body: Body | None = None
    accept: str = encoding.JSON


class Response(NamedTuple):
    """An answer. `retry_after` has the seconds of the server's header Retry-After, or 0."""

    status: int
    body: bytes
    retry_after: float = 0


class Lines(NamedTuple):
    """The answer to a watch. `lines` yields each line as it comes, or the body of an error."""

    status: int
    lines: Iterator[bytes]


class Transport(Protocol):
    """Sends requests. Raises Unavailable if no answer comes. Never repeats a change."""

    def send(self, request: RestRequest, patience: float, most: int = 0) -> Response:
        """Send a request, and return its answer within about `patience` seconds.

        If `most` is not 0, raises AnswerTooLarge for an answer of more than `most` bytes.
        """

    def follow(self, where: str, query: Query) -> Lines:
        """Start a watch. `lines` of the answer raises Unavailable after a long silence."""


class RestRequests:
    """The common part of all verbs. Threads may share it. Each call may raise ApiError."""

    def __init__(
        self,
        transport: Transport,
        writer: str,
        timeout: float,
        pace: Pace | None,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._transport = transport
        self._writer = writer
        self._timeout = timeout
        self._pace = pace or Pace()
        self._clock = clock
        self._sleep = sleep
        self._page_sizes: dict[str, int] = {}  # the number of objects in a page, by list
        self.errors: Counter[tuple[str, str]] = Counter()  # by verb and kind of error

    def pages(
        self, what: str, where: str, selector: Query = (), most: int = 0
    ) -> Iterator[encoding.Page]:
        """Yield a LIST in pages. Large objects make shorter pages. Raises WatchExpired."""
        start: Query = selector
        while True:
            size = self._page_sizes.get(what, encoding.PAGE)
            query = [("limit", str(min(most or size, size))), *start]
            bound = encoding.MOST_PAGE if size > 1 else 0
            try:
                answer = self.read(what, where, query, bound)
            except AnswerTooLarge:
                self._page_sizes[what] = max(1, size // 4)
                continue
            except Unavailable:  # a page of this size may take the server too long
                self._page_sizes[what] = min(size, max(LEAST_PAGE, size // 4))
                raise
            if 4 * len(answer) < encoding.MOST_PAGE:
                self._page_sizes[what] = min(encoding.PAGE, 2 * size)
            page = decoded(what, answer, encoding.Page)
            yield page
            if not page.metadata.continue_:
                return
            start = [*selector, ("continue", page.metadata.continue_)]

    def read(
        self, what: str, where: str, query: Query = (), most: int = 0, accept: str = encoding.JSON
    ) -> bytes:
        """Send a GET, and repeat it while the server does not answer. Raises AnswerTooLarge."""
        request = RestRequest("GET", where, query, accept=accept)
        deadline, backoff = self._deadline(), Backoff(FIRST_BACKOFF, LONGEST_BACKOFF)
        while True:
            try:
                return self.send(what, request, most, deadline)
            except Unavailable:
                wait = backoff.pause() * random.uniform(0.5, 1.5)
                if self._clock() + wait >= deadline:
                    raise
            with interrupts.waiting():
                self._sleep(wait)

    def change(
        self, what: str, method: str, where: str, body: Body, accept: str = encoding.JSON
    ) -> bytes:
        """Send a change. Returns the stored object."""
        query = [("fieldManager", self._writer), ("fieldValidation", "Strict")]
        return self.send(what, RestRequest(method, where, query, body, accept))

    def send(
        self, what: str, request: RestRequest, most: int = 0, deadline: float | None = None
    ) -> bytes:
        """Send a request once, and return its answer. Raises AnswerTooLarge."""
        if deadline is None:
            deadline = self._deadline()
        with interrupts.waiting():
            self._take_turn(what, deadline)
            patience = max(deadline - self._clock(), 0.01)
            try:
                answer = self._transport.send(request, patience, most)
            except Unavailable as error:
                raise self._failed(what, Unavailable(f"{what}: {error}")) from error
        if answer.status >= HTTPStatus.MULTIPLE_CHOICES:
            raise self._error(what, answer)
        return answer.body

    def _deadline(self) -> float:
        return self._clock() + self._timeout

    def _take_turn(self, what: str, deadline: float) -> None:
        if not self._pace.turn(deadline - self._clock()):
            why = "not sent: too many requests wait, or the server requested a pause"
            raise self._failed(what, Unavailable(f"{what}: {why}"))

    def follow(self, what: str, where: str, query: Query) -> Iterator[bytes]:
        """Yield the lines of a watch."""
        self._take_turn(what, self._deadline())
        answer = self._transport.follow(where, query)
        if answer.status != HTTPStatus.OK:
            raise self._error(what, Response(answer.status, b"".join(answer.lines)))
        return answer.lines

    def _error(self, what: str, answer: Response) -> ApiError:
        try:
            status = encoding.decode(answer.body, encoding.Status)
        except msgspec.MsgspecError:
            status = encoding.Status(message=answer.body[:200].decode(errors="replace"))
        if answer.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            self._pace.pause(answer.retry_after)
        return self._failed(what, error_of(what, answer.status, status))

    def _failed(self, what: str, error: ApiError) -> ApiError:
        self.errors[what.partition(" ")[0], type(error).__name__] += 1
        return error


def decoded(
    what: str, found: bytes | msgspec.Raw, kind: type[encoding.AnyType]
) -> encoding.AnyType:
    try:
        return encoding.decode(found, kind)
    except msgspec.MsgspecError as error:
        raise Refused(f"{what}: the API server's answer cannot be decoded: {error}") from error


def error_of(what: str, code: int, status: encoding.Status) -> ApiError:
    text = f"{what}: {code} {status.message.strip()}".rstrip()
    if code == HTTPStatus.NOT_FOUND:
        return NotFound(text)
    if code == HTTPStatus.CONFLICT:
        return AlreadyExists(text) if status.reason == "AlreadyExists" else Conflict(text)
    if code == HTTPStatus.GONE:
        return WatchExpired(text)
    return Refused(text) if code in _REFUSALS else Unavailable(text)
