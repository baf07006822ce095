"""The agent's log on standard error: a line for each event, with the call's fields.

    2026-01-02T03:04:05.678Z INFO done in 3.1 ms  plugin=ipoib verb=ADD attachment=net/cid/eth0
    {"time": "2026-01-02T03:04:05.678Z", "level": "info", "message": "done in 3.1 ms", ...}

Text from a pod or a client cannot forge a line: unprintable characters are escaped, and tracebacks
are indented. It cannot forge a field, because two spaces in a row occur only before the fields.
"""

import json
import logging
import re
import time
from collections.abc import Mapping
from contextvars import ContextVar

import msgspec

from agent.serve.framing import LauncherRequest
from agent.settings import Settings
from base import decoding
from base.interrupts import Bound
from base.text import printable, without_middle
from cni.spec import limits
from cni.spec.errors import CNIError

MAX_FIELD = 256  # characters
MAX_MESSAGE = 8_000
MAX_TRACEBACK = 16_000

# At level "debug" these libraries log every step.
_QUIET = ("asyncio", "concurrent")
_ATTACHMENT = ("network", "container_id", "ifname")

_fields: ContextVar[Mapping[str, object] | None] = ContextVar("fields", default=None)


def fields(**values: object) -> Bound[None, Mapping[str, object]]:
    """Add fields to the lines that this thread logs in the block. Leaves out empty fields."""
    return Bound(_fields, {**(_fields.get() or {}), **values})


def of_call(request: LauncherRequest, number: int) -> dict[str, object]:
    """The log fields of a call, as the client sent them, each cut to MAX_FIELD characters."""
    environ = request.environ
    return {
        "request": number,
        "plugin": request.name[:MAX_FIELD],
        "verb": environ.get("CNI_COMMAND", "")[:MAX_FIELD],
        "container_id": environ.get("CNI_CONTAINERID", "")[:MAX_FIELD],
        "ifname": environ.get("CNI_IFNAME", "")[:MAX_FIELD],
        "network": _network(request.config)[:MAX_FIELD],
    }


def configure(settings: Settings) -> None:
    """Set format and level. The agent calls this again when the settings change."""
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a failed write of the log must not end a call
    # No line shows these fields, and they take a third of a line's time (logging's HOWTO).
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    root = logging.getLogger()
    handler = next((known for known in root.handlers if isinstance(known, _Handler)), None)
    if handler is None:
        handler = _Handler()
        root.addHandler(handler)
    handler.setFormatter(_Json() if settings.log_format == "json" else _Text())
    root.setLevel(settings.log_level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(root.level, logging.WARNING))


class _Handler(logging.StreamHandler):  # type: ignore[type-arg] # no parameters at run time
    """`configure` finds the agent's handler by this class."""


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = printable(_message(record))
        if "  " in message:
            message = re.sub("  +", " ", message)
        level = printable(record.levelname)
        line = f"{_time(record)} {level} {message}{_text_fields(_current())}"
        if not (record.exc_info or record.exc_text or record.stack_info):
            return line
        more = [f"    {printable(text)}" for text in _traceback(record).splitlines()]
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
        return json.dumps({**_current(), **line}, default=str)


def _current() -> dict[str, object]:
    return {
        name: value if isinstance(value, int) else str(value)[:MAX_FIELD]
        for name, value in (_fields.get() or {}).items()
        if value not in ("", None)
    }


def _text_fields(current: dict[str, object]) -> str:
    if all(part in current for part in _ATTACHMENT):
        parts = [str(current.pop(part)) for part in _ATTACHMENT]
        current["attachment"] = "/".join(parts)
    pairs = [f"{name}={_quoted(str(value))}" for name, value in current.items()]
    return "  " + " ".join(pairs) if pairs else ""


_PLAIN = re.compile(r"[!#-<>-\[\]-~]*")  # printable ASCII without space, quote, "=" and backslash


def _quoted(value: str) -> str:
    if _PLAIN.fullmatch(value):
        return value
    if any(character in value for character in ' "=\\'):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{printable(escaped)}"'
    return printable(value)


def _message(record: logging.LogRecord) -> str:
    try:
        message = record.getMessage().rstrip()
    except (TypeError, ValueError):  # a library's format and arguments differ: log both
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
    try:
        limits.require_readable(config)
        return decoding.decode(config, _NetworkName).name
    except (CNIError, msgspec.MsgspecError):
        return ""
