"""/etc/podfabric/config.yaml: what it may say, reading it, and seeing it change.

    agent:
      workers: 32
    pools: ...      # the device plugin's, not read here

YAML or JSON. A file that is not there says nothing, and everything has a default. Every other
mistake is an error that names the file, the key and what to do.
"""

import ipaddress
import logging
import os
import select
import stat
import threading
import typing
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from inotify_simple import INotify, flags

from cni.spec.config import resembling

MAX_BYTES = 256 << 10
PARTS = ("agent", "pools")
LOOK_EVERY = 5.0  # seconds, where the kernel does not tell of a change
SETTLE = 0.2  # seconds without another change, before a changed file is read

_log = logging.getLogger(__name__)

_EVENTS = (
    flags.CLOSE_WRITE
    | flags.CREATE
    | flags.DELETE
    | flags.MOVED_FROM
    | flags.MOVED_TO
    | flags.ATTRIB
)
_MAX_SOCKET_PATH = 107  # bytes: sockaddr_un has 108, and a NUL ends it (unix(7))


class SettingsError(Exception):
    """A configuration that cannot be used. The text names file and key and says what to do."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The part `agent`. Times are seconds. docs/agent.md has the table for users."""

    workers: Annotated[int, msgspec.Meta(ge=1, le=256)] = 64
    deadline: Annotated[float, msgspec.Meta(ge=1, le=600)] = 100.0
    grace: Annotated[float, msgspec.Meta(ge=0, le=600)] = 60.0
    connections: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 512
    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    listen: str = "127.0.0.1:9810"
    sweep: bool = True


AT_START_ONLY = frozenset(("listen", "sweep"))
"""Keys that a running agent does not take over."""


def load(path: Path) -> Settings:
    """The settings in that file; the defaults where there is none. Raises SettingsError."""
    try:
        content = _read(path)
    except (FileNotFoundError, NotADirectoryError):
        return Settings()
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    return parse(content, str(path))


def parse(content: bytes, name: str) -> Settings:
    """The settings that a file of this content has; `name` is for the errors (SettingsError)."""
    whole = _mapping(_decode(content, name), name)
    for key in whole:
        if key not in PARTS:
            raise SettingsError(f"{name}: {key}: {_unknown_part(key)}")
    return _settings(_mapping(whole.get("agent"), f"{name}: agent"), name)


def listen_address(listen: str) -> Path | tuple[str, int] | None:
    """What `listen` means: a unix socket's path, address and port, or nothing.

    ValueError if it is neither, or reaches beyond this machine: the text says what to write.
    """
    if not listen:
        return None
    if listen.startswith("unix:"):
        return _socket_path(listen.removeprefix("unix:"))
    host, colon, port = listen.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        address = ipaddress.ip_address(host[1:-1] if bracketed else host)
    except ValueError:
        address = None
    number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else 65536
    if address is None or not colon or bracketed is not (address.version == 6) or number > 65535:
        raise ValueError('write "127.0.0.1:9810", "[::1]:9810", "unix:/path", or "" for none')
    if not address.is_loopback:
        raise ValueError(
            "the endpoint knows no clients from strangers, so only loopback addresses (127.0.0.1, "
            "[::1]) and unix sockets are allowed: put a proxy in front"
        )
    return str(address), number


class Watched:
    """Calls `changed` with new settings whenever the file says something else than before.

    A thread of its own looks, until `close`. The directory is watched and not the file, which
    editors and ConfigMap mounts replace; and what inotify cannot tell of (no directory yet, a
    link's target elsewhere) is seen by a look every few seconds. A file that is wrong is
    logged, and the settings before it stay in force.
    """

    def __init__(
        self,
        path: Path,
        current: Settings,
        changed: Callable[[Settings], object],
        look_every: float = LOOK_EVERY,
    ) -> None:
        self._path = path
        self._current = current
        self._changed = changed
        self._look_every = look_every
        self._wrong = ""
        self._watch: int | None = None
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._any, self._ended = select.poll(), select.poll()
        self._any.register(self._end, select.POLLIN)
        self._ended.register(self._end, select.POLLIN)
        self._inotify = self._open()
        self._thread = threading.Thread(target=self._run, name="settings", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No call of `changed` begins after this."""
        if not self._thread.is_alive():
            return
        os.eventfd_write(self._end, 1)
        self._thread.join()
        os.close(self._end)
        if self._inotify is not None:
            self._inotify.close()

    def _open(self) -> INotify | None:
        try:
            inotify = INotify(nonblocking=True)
        except OSError as error:  # fs.inotify.max_user_instances, or no descriptor left
            _log.warning("inotify: %s: %s is looked at now and then", error.strerror, self._path)
            return None
        self._any.register(inotify, select.POLLIN)
        return inotify

    def _run(self) -> None:
        seen: tuple[int, ...] = ()  # so that a change since the settings were loaded counts
        while True:
            self._follow_directory()
            if self._fingerprint() != seen:
                settled = self._settled()
                if settled is None:
                    return
                seen = settled
                self._take()
            self._any.poll(self._look_every * 1000)
            if self._ended.poll(0):
                return
            if self._inotify is not None and self._inotify.read(timeout=0):
                seen = ()  # whatever the fingerprint says: its times are coarse

    def _follow_directory(self) -> None:
        """Watch what has the directory's name now. To watch what is watched changes nothing."""
        if self._inotify is None:
            return
        try:
            watch = self._inotify.add_watch(self._path.parent, _EVENTS)
        except OSError:  # no directory yet
            watch = None
        if self._watch not in (None, watch):
            with suppress(OSError):  # gone with its directory
                self._inotify.rm_watch(self._watch)
        self._watch = watch

    def _fingerprint(self) -> tuple[int, ...]:
        """What changes with the file's content, whoever replaces it and how."""
        try:
            found = self._path.stat()
        except OSError as error:
            return (error.errno or 0,)
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def _settled(self) -> tuple[int, ...] | None:
        """The fingerprint once it stays, for a writer may be at work; None if it is the end."""
        last = self._fingerprint()
        for _ in range(25):
            if self._ended.poll(SETTLE * 1000):
                return None
            if last == (last := self._fingerprint()):
                break
        if self._inotify is not None:
            self._inotify.read(timeout=0)
        return last

    def _take(self) -> None:
        try:
            new = load(self._path)
        except SettingsError as error:
            if str(error) != self._wrong:
                _log.error("%s (the settings before it stay in force)", error)
            self._wrong = str(error)
            return
        if self._wrong:
            _log.info("%s: can be used again", self._path)
        self._wrong = ""
        if new == self._current:
            return
        _log.info("%s: %s", self._path, _difference(self._current, new))
        self._current = new
        self._changed(new)


def _difference(old: Settings, new: Settings) -> str:
    changes = []
    for key in Settings.__struct_fields__:
        before, after = getattr(old, key), getattr(new, key)
        if before != after:
            later = " (from the agent's next start on)" if key in AT_START_ONLY else ""
            changes.append(f"{key} was {before!r}, is {after!r}{later}")
    return "; ".join(changes)


def _socket_path(text: str) -> Path:
    if not text.startswith("/") or "\0" in text:
        raise ValueError('write an absolute path behind "unix:"')
    if len(os.fsencode(text)) > _MAX_SOCKET_PATH:
        raise ValueError(f"a unix socket's path has at most {_MAX_SOCKET_PATH} bytes")
    return Path(text)


def _read(path: Path) -> bytes:
    # Not blocking, for what is no file (a FIFO) would be waited for.
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise SettingsError(f"{path}: is no file: put one there, or nothing")
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise SettingsError(f"{path}: is larger than {MAX_BYTES} bytes")
    return content


def _decode(content: bytes, name: str) -> object:
    if content.lstrip().startswith(b"{"):
        # PyYAML refuses JSON that is indented by tabs and takes 1e2 for a string.
        try:
            return msgspec.json.decode(content)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass  # it may be YAML's own form with braces
    import yaml  # not earlier: only a node that has a file needs it

    try:
        # Not CSafeLoader: deep nesting overflows its C stack, and the process dies.
        loader = yaml.SafeLoader(content)
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_repeated(node, name, set())
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = error.problem or error.context
        raise SettingsError(f"{name}: {place}neither YAML nor JSON: {problem}") from None
    except RecursionError:
        raise SettingsError(f"{name}: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        text = " ".join(str(error).split())
        raise SettingsError(f"{name}: neither YAML nor JSON: {text}") from None


def _refuse_repeated(node: Any, name: str, seen: set[int]) -> None:  # noqa: ANN401 - lazily imported
    """PyYAML takes the last of two equal keys, and the first would be lost without a word."""
    if id(node) in seen or isinstance(node.value, str):
        return
    seen.add(id(node))  # an alias may lead back to where it stands
    keys: set[str] = set()
    for child in node.value:
        if not isinstance(child, tuple):
            _refuse_repeated(child, name, seen)
            continue
        key, value = child
        text = key.value if isinstance(key.value, str) else ""
        if text and text in keys:
            line = key.start_mark.line + 1
            raise SettingsError(f"{name}: line {line}: {text}: is there twice: keep one")
        keys.add(text)
        _refuse_repeated(value, name, seen)


def _mapping(value: object, where: str) -> dict[str, Any]:
    if value is None:  # nothing but comments
        return {}
    if not isinstance(value, dict):
        raise SettingsError(f"{where}: expected keys with values, got {_shown(value)}")
    for key in value:
        if not isinstance(key, str):
            raise SettingsError(f"{where}: {_shown(key)}: unknown key")
    return value


def _settings(given: dict[str, Any], name: str) -> Settings:
    types = typing.get_type_hints(Settings, include_extras=True)
    values = {}
    for key, value in given.items():
        if key not in types:
            raise SettingsError(f"{name}: agent.{key}: unknown key: {_hint(key, types)}")
        try:
            # NaN is neither below nor above any limit.
            if value != value:
                raise msgspec.ValidationError("Expected a number")
            values[key] = msgspec.convert(value, type=types[key])
            if key == "listen":
                listen_address(value)
        except ValueError as error:
            text = _explained(error, types[key])
            raise SettingsError(f"{name}: agent.{key}: {_shown(value)}: {text}") from None
    return Settings(**values)


def _explained(error: ValueError, shape: object) -> str:
    """msgspec says "Invalid enum value 'loud'" and "Expected `int` <= 256"."""
    if typing.get_origin(shape) is Literal:
        return f"expected one of {', '.join(typing.get_args(shape))}"
    text = str(error).replace("`", "")
    return text[:1].lower() + text[1:]


def _unknown_part(key: str) -> str:
    if key in Settings.__struct_fields__:
        return 'unknown key: it belongs below "agent"'
    return f"unknown key: {_hint(key, PARTS)}"


def _hint(key: str, known: typing.Collection[str]) -> str:
    nearest = resembling(key, known)
    return f'did you mean "{nearest}"?' if nearest else f"valid keys are {', '.join(sorted(known))}"


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
