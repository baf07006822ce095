"""Requests to the API server's HTTP interface, over any `Transport`: their turns, repeats, errors.

Reads are repeated while the server has no answer. A change is sent once: if its answer is lost it
may have had its effect, and only the caller can find out.
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
LONGEST_PAUSE = 30.0  # seconds; a server that asks for more gets this much


class Pace:
    """Gives turns to the threads of one client, `rate` a second after `burst` at once."""

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
        """Wait for this thread's turn. False at once if that takes longer than `patience`."""
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
        """No request has a turn for so long: the server asked for it (Retry-After)."""
        with self._lock:
            until = self._clock() + min(seconds, LONGEST_PAUSE)
            self._paused_until = max(self._paused_until, until)


TIMEOUT = 10.0  # seconds of a call with all its attempts; of each page of a LIST
FIRST_BACKOFF, LONGEST_BACKOFF = 0.2, 5.0
LEAST_PAGE = 16  # objects, where it is not known how large they are
RESTARTS = 3  # of a LIST whose pages expire while they are read

_REFUSALS = frozenset({400, 401, 403, 405, 406, 413, 415, 422})

T = TypeVar("T")
Query = Sequence[tuple[str, str]]
Body = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""A document, or the operations of a JSON patch, which only a PATCH has."""


class AnswerTooLarge(ApiError):
    """An answer has more bytes than it may have. The rest of it was not read."""


class RestRequest(NamedTuple):
    """A request at the path `where`."""

    method: str
    where: str
    query: Query = ()
    body: Body | None = None
    accept: str = encoding.JSON


class Response(NamedTuple):
    """`retry_after`: the seconds that the server asks for in a header, 0 for none."""

    status: int
    body: bytes
    retry_after: float = 0


class Lines(NamedTuple):
    """An answer that goes on: its lines, as they come. Without success they are its body's."""

    status: int
    lines: Iterator[bytes]


class Transport(Protocol):
    """Sends requests. It raises Unavailable where no answer comes, and never repeats a change."""

    def send(self, request: RestRequest, patience: float, most: int = 0) -> Response:
        """The answer to one request, after `patience` seconds at most. AnswerTooLarge: it has more
        than `most` bytes, if that is not 0."""

    def follow(self, where: str, query: Query) -> Lines:
        """The answer to a GET that goes on. Its lines end where the connection does, with
        Unavailable where it shows nothing for too long."""


class RestRequests:
    """What all verbs have in common. Threads may share it. Each call raises ApiError."""

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
        self._page_sizes: dict[str, int] = {}  # how many objects a page has, by what is listed
        self.errors: Counter[tuple[str, str]] = Counter()  # by verb and kind of error

    def pages(
        self, what: str, where: str, selector: Query = (), most: int = 0
    ) -> Iterator[encoding.Page]:
        """Page by page. Where objects are large, a page has few of them. WatchExpired."""
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
            except Unavailable:  # perhaps since the server works on such a page for too long
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
        self,
        what: str,
        where: str,
        query: Query = (),
        most: int = 0,
        accept: str = encoding.JSON,
    ) -> bytes:
        """The answer to a GET, which is repeated while the server has none. AnswerTooLarge."""
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
        """Send a change; the object as it was stored."""
        query = [("fieldManager", self._writer), ("fieldValidation", "Strict")]
        return self.send(what, RestRequest(method, where, query, body, accept))

    def send(
        self,
        what: str,
        request: RestRequest,
        most: int = 0,
        deadline: float | None = None,
    ) -> bytes:
        """The answer to one request, which is sent once. AnswerTooLarge: see Transport."""
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
            why = "not sent: too many requests, or the server asked to wait"
            raise self._failed(what, Unavailable(f"{what}: {why}"))

    def follow(self, what: str, where: str, query: Query) -> Iterator[bytes]:
        """The lines of a GET that goes on."""
        self._take_turn(what, self._deadline())
        answer = self._transport.follow(where, query)
        if answer.status != HTTPStatus.OK:
            raise self._error(what, Response(answer.status, b"".join(answer.lines)))
        return answer.lines

    def _error(self, what: str, answer: Response) -> ApiError:
        """What an answer without success means."""
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
        raise Refused(f"{what}: the answer has another form: {error}") from error


def error_of(what: str, code: int, status: encoding.Status) -> ApiError:
    """The error that an HTTP status stands for."""
    text = f"{what}: {code} {status.message.strip()}".rstrip()
    if code == HTTPStatus.NOT_FOUND:
        return NotFound(text)
    if code == HTTPStatus.CONFLICT:
        return AlreadyExists(text) if status.reason == "AlreadyExists" else Conflict(text)
    if code == HTTPStatus.GONE:
        return WatchExpired(text)
    return Refused(text) if code in _REFUSALS else Unavailable(text)
