"""The agent's part of /etc/podfabric/config.yaml: its keys, reading it, and watching for changes.

    agent:
      workers: 32
    policy:
      whole_pfs: true   # what network configurations may ask for (cni.policy.rules)
    ipam:
      scope: cluster    # whose addresses are (ipam.scope)
    pools: ...          # the device plugin's (deviceplugin.pools.config), not read here

The file is YAML or JSON and may be missing: every key has a default. A mistake is an error that
names the file, the key and the remedy.
"""

import ipaddress
import logging
import os
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from base import documents, watching
from base.documents import DocumentError
from cni.policy import rules
from cni.policy.rules import Policy
from cni.spec.limits import MAX_BYTES
from deviceplugin.pools import config
from ipam import scope
from ipam.scope import AddressSettings

_log = logging.getLogger(__name__)

UNIX = "unix:"
_MAX_SOCKET_PATH = 107  # bytes: sockaddr_un has 108, and a NUL ends it (unix(7))


class SettingsError(Exception):
    """A configuration that cannot be used. The text names the file, the key and the remedy."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The parts `agent`, `policy` and `ipam`. Times are seconds. docs/agent.md has the table."""

    workers: Annotated[int, msgspec.Meta(ge=1, le=256)] = 64
    deadline: Annotated[float, msgspec.Meta(ge=1, le=600)] = 100.0
    grace: Annotated[float, msgspec.Meta(ge=0, le=600)] = 60.0
    connections: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 512
    max_config_bytes: Annotated[int, msgspec.Meta(ge=64 << 10, le=MAX_BYTES)] = MAX_BYTES
    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    listen: str = "127.0.0.1:9810"
    sweep: bool = True
    policy: Policy = Policy()
    ipam: AddressSettings = AddressSettings()


AT_START_ONLY = frozenset(("listen", "sweep", "ipam"))
"""Keys that take effect only when the agent starts."""


def load(path: Path) -> Settings:
    """The settings in that file, the defaults if it is missing. Raises SettingsError."""
    try:
        content = documents.read(path)
    except (FileNotFoundError, NotADirectoryError):
        return Settings()
    except DocumentError as error:
        raise SettingsError(str(error)) from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    return parse(content, str(path))


def parse(content: bytes, name: str) -> Settings:
    """The settings in a file's content. `name` is for the texts of SettingsError."""
    try:
        whole = documents.mapping(documents.decode(content, name), name)
        for key in whole:
            if not config.is_part(key):
                raise DocumentError(f"{name}: {key}: {_unknown_part(key)}")
        policy = rules.of(whole.get(rules.PART), name)
        ipam = scope.of(whole.get(scope.PART), name)
        return msgspec.structs.replace(
            _settings(whole.get("agent"), name), policy=policy, ipam=ipam
        )
    except DocumentError as error:
        raise SettingsError(str(error)) from None


def listen_address(listen: str, *, local: bool = True) -> Path | tuple[str, int] | None:
    """The unix socket's path, or address and port, in `listen`; None if it is empty.

    ValueError if it is wrong, or must be `local` to this machine and is not: the text says what to
    write.
    """
    if not listen:
        return None
    if listen.startswith(UNIX):
        return _socket_path(listen.removeprefix(UNIX))
    host, colon, port = listen.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        address = ipaddress.ip_address(host[1:-1] if bracketed else host)
    except ValueError:
        address = None
    number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else 65536
    if address is None or not colon or bracketed is not (address.version == 6) or number > 65535:
        raise ValueError('write "127.0.0.1:9810", "[::1]:9810", "unix:/path", or "" for none')
    if local and not address.is_loopback:
        raise ValueError(
            "the endpoint does not authenticate clients, so only loopback addresses (127.0.0.1, "
            "[::1]) and unix sockets are allowed: use a proxy for others"
        )
    return str(address), number


class WatchedSettings:
    """Calls `changed` with new settings when the file has changed, until `close`.

    A mistake in the file is logged, and the previous settings stay in force.
    """

    def __init__(
        self,
        path: Path,
        current: Settings,
        changed: Callable[[Settings], object],
        look_every: float = watching.LOOK_EVERY,
    ) -> None:
        self._path = path
        self._current = current
        self._changed = changed
        self._mistake: str | None = None
        self._watched = watching.WatchedFile(path, self._take, look_every)

    def close(self) -> None:
        """Stop watching: no call of `changed` begins after this."""
        self._watched.close()

    def _take(self) -> None:
        try:
            new = load(self._path)
        except SettingsError as error:
            if str(error) != self._mistake:
                _log.error("%s (the previous settings stay in force)", error)
            self._mistake = str(error)
            return
        if self._mistake:
            _log.info("%s: can be used again", self._path)
        self._mistake = None
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
            later = " (when the agent starts again)" if key in AT_START_ONLY else ""
            changes.append(f"{key} was {before!r}, is {after!r}{later}")
    return "; ".join(changes)


def _socket_path(text: str) -> Path:
    if not text.startswith("/") or "\0" in text:
        raise ValueError('write an absolute path behind "unix:"')
    if len(os.fsencode(text)) > _MAX_SOCKET_PATH:
        raise ValueError(f"a unix socket's path has at most {_MAX_SOCKET_PATH} bytes")
    return Path(text)


def _settings(part: object, name: str) -> Settings:
    shapes = typing.get_type_hints(Settings, include_extras=True)
    for part_of_file in ("policy", "ipam"):  # not of `agent`
        del shapes[part_of_file]
    values = documents.fields(part, shapes, f"{name}: agent")
    if "listen" in values:
        try:
            listen_address(values["listen"])
        except ValueError as error:
            listen = documents.shown(values["listen"])
            raise DocumentError(f"{name}: agent.listen: {listen}: {error}") from None
    return Settings(**values)


def _unknown_part(key: str) -> str:
    if key in Settings.__struct_fields__:
        return 'unknown key: it belongs below "agent"'
    return f"unknown key: {documents.hint(key, config.PARTS)}"
