"""The agent's log on standard error: one line an event, each with the call that it is about.

    2026-01-02T03:04:05.678Z INFO done in 3.1 ms  plugin=ipoib verb=ADD attachment=net/cid/eth0
    {"time": "2026-01-02T03:04:05.678Z", "level": "info", "message": "done in 3.1 ms", ...}

Below systemd's journal, which has the time, a text line begins with its priority instead
(sd-daemon(3)). What a pod or a client wrote cannot forge a line: characters that are not
printable are escaped, and a traceback's lines are indented. Nor can it forge a field: of two spaces
in a row, only those before the fields are left. All of it is cut to a sensible length.
"""

import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import msgspec

from agent.framing import LauncherRequest
from agent.settings import Settings
from base.text import printable, without_middle
from cni.spec import limits
from cni.spec.errors import CNIError

MAX_FIELD = 256  # characters
MAX_MESSAGE = 8_000
MAX_TRACEBACK = 16_000

_PRIORITIES = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}
# At our level "debug" they would say how they do what we asked them.
_QUIET = ("asyncio", "concurrent", "filelock")
_ATTACHMENT = ("network", "container_id", "ifname")

_fields: ContextVar[Mapping[str, object] | None] = ContextVar("fields", default=None)


@contextmanager
def fields(**values: object) -> Iterator[None]:
    """What is logged in the block, in this thread, bears these; "" and None are left out."""
    token = _fields.set({**(_fields.get() or {}), **values})
    try:
        yield
    finally:
        _fields.reset(token)


def of_call(request: LauncherRequest, number: int) -> dict[str, object]:
    """The fields that name a call, for `fields`; each is what the client sent, cut short."""
    environ = request.environ
    return {
        "request": number,
        "plugin": request.name[:MAX_FIELD],
        "verb": environ.get("CNI_COMMAND", "")[:MAX_FIELD],
        "container_id": environ.get("CNI_CONTAINERID", "")[:MAX_FIELD],
        "ifname": environ.get("CNI_IFNAME", "")[:MAX_FIELD],
        "network": _network(request.config)[:MAX_FIELD],
    }


def configure(settings: Settings, environ: Mapping[str, str] = os.environ) -> None:
    """Log in that format from that level on; again whenever the settings change."""
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a log that cannot be written must not end a call
    root = logging.getLogger()
    handler = next((one for one in root.handlers if isinstance(one, _Handler)), None)
    if handler is None:
        handler = _Handler()
        root.addHandler(handler)
    if settings.log_format == "json":
        handler.setFormatter(_Json())
    else:
        handler.setFormatter(_Text(journal=_is_journal(environ.get("JOURNAL_STREAM", ""))))
    root.setLevel(settings.log_level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(root.level, logging.WARNING))


class _Handler(logging.StreamHandler):  # type: ignore[type-arg] # no parameters at run time
    """Ours among the handlers: to standard error."""


class _Text(logging.Formatter):
    def __init__(self, *, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        if self._journal:
            start = f"<{_PRIORITIES.get(record.levelname, 6)}>"
            head = start
        else:
            start = ""
            head = f"{_time(record)} {printable(record.levelname)} "
        message = re.sub("  +", " ", printable(_message(record)))
        line = f"{head}{message}{_text_fields(_current(record))}"
        more = [f"{start}    {printable(text)}" for text in _traceback(record).splitlines()]
        return "\n".join((line, *more))


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "message": _message(record),
            "logger": record.name,
        }
        if traceback := _traceback(record):
            line["traceback"] = traceback
        # json and not msgspec: undecodable bytes of the environment are surrogates
        return json.dumps({**_current(record), **line}, default=str)


def _current(record: logging.LogRecord) -> dict[str, object]:
    return {
        name: value if isinstance(value, int) else str(value)[:MAX_FIELD]
        for name, value in (_fields.get() or {}).items()
        if value not in ("", None)
    }


def _text_fields(current: dict[str, object]) -> str:
    attachment = [current.get(part) for part in _ATTACHMENT]
    if all(attachment):
        for part in _ATTACHMENT:
            del current[part]
        current["attachment"] = "/".join(str(part) for part in attachment)
    pairs = (f"{name}={_quoted(str(value))}" for name, value in current.items())
    return "".join(f"{' ' if number else '  '}{pair}" for number, pair in enumerate(pairs))


def _quoted(value: str) -> str:
    if any(character in value for character in ' "=\\'):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{printable(escaped)}"'
    return printable(value)


def _message(record: logging.LogRecord) -> str:
    try:
        message = record.getMessage().rstrip()
    except (TypeError, ValueError):  # a library's mistake: what it meant to say is here
        message = f"{record.msg} {record.args}"
    return without_middle(message, MAX_MESSAGE)


def _traceback(record: logging.LogRecord) -> str:
    if record.exc_info and not record.exc_text:
        record.exc_text = logging.Formatter().formatException(record.exc_info)
    texts = (record.exc_text, record.stack_info)
    return without_middle("\n".join(text for text in texts if text), MAX_TRACEBACK)


def _time(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03d}Z"


class _NetworkName(msgspec.Struct):
    name: str = ""


def _network(config: bytes) -> str:
    """The network's name, as far as it can be read."""
    try:
        limits.require_readable(config)
        return msgspec.json.decode(config, type=_NetworkName).name
    except (CNIError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


def _is_journal(stream: str) -> bool:
    """Whether JOURNAL_STREAM is about our standard error (systemd.exec(5)), still."""
    try:
        found = os.fstat(2)
    except OSError:
        return False
    return stream == f"{found.st_dev}:{found.st_ino}"
