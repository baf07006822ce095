"""Reads the agent's sections of /etc/podfabric/config.yaml, and reads them again after a change.

    agent:
      workers: 32
    policy:
      set: {pfOnly: [true]}   # the limits of network configurations (policy.rules)
    ipam:
      scope: cluster    # where the node's addresses come from (ipam.store_choice)

The file may be missing, because every key has a default. A section with a mistake keeps the last
settings that this agent read without a mistake. Before the first such read, `agent` has its
defaults, and a call that needs `policy` or `ipam` fails. A mistake elsewhere affects all sections.
"""

import logging
import os
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from base import address_text, documents
from base.documents import DocumentError
from cni.spec.errors import CNIError, Code
from cni.spec.limits import MAX_BYTES
from deviceplugin.pools import pool_config
from ipam import store_choice
from ipam.store_choice import AddressSettings
from policy import rules
from policy.document import PART
from policy.rules import Policy

_log = logging.getLogger(__name__)

UNIX = "unix:"
_MAX_SOCKET_PATH = 107  # bytes: sockaddr_un has 108, and the last is a NUL (unix(7))


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The sections `agent`, `policy` and `ipam`. Times are in seconds."""

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


SECTIONS = ("agent", PART, store_choice.PART)  # this module reads each section independently
PARTS = (*SECTIONS, "pools")

_CLOSED = {
    "agent": "agent has its defaults",
    PART: "no pod is attached, since the rules of the node are not known",
    store_choice.PART: "no pod gets an address, since the scope of addresses is not known",
}

AT_START_ONLY = frozenset(("listen", "sweep", "ipam"))  # keys read only at the start


class Loaded(NamedTuple):
    """The content of the file.

    `mistakes` has an error text for each section with a mistake. `unread` has the sections that
    this agent has never read without a mistake. In `settings`, these sections have their defaults.
    """

    settings: Settings
    mistakes: Mapping[str, str] = {}
    unread: frozenset[str] = frozenset()

    def require(self, section: str) -> None:
        """Raise CNIError 5 if the section is in `unread`."""
        if section in self.unread:
            raise CNIError(
                Code.IO_FAILURE,
                f"{self.mistakes[section]}: nothing was done, because this call needs the "
                f'section "{section}": correct the file',
            )


NOTHING = Loaded(Settings(), unread=frozenset(SECTIONS))  # before the file was read


def load(path: Path, before: Loaded = NOTHING) -> Loaded:
    """Read the file.

    Returns the defaults if the file is missing. `before` is the previous result.
    """
    try:
        content = documents.read(path)
    except (FileNotFoundError, NotADirectoryError):
        return Loaded(Settings())
    except DocumentError as error:
        return _kept(before, dict.fromkeys(SECTIONS, str(error)))
    except OSError as error:
        text = f"{path}: cannot be read: {error.strerror}"
        return _kept(before, dict.fromkeys(SECTIONS, text))
    return parse(content, str(path), before)


def parse(content: bytes, name: str, before: Loaded = NOTHING) -> Loaded:
    """Read the content of a file. `name` is the file's name in error texts."""
    try:
        whole = documents.mapping(documents.decode(content, name), name)
        for key in whole:
            if not pool_config.is_part(key):
                hint = documents.hint(key, pool_config.PARTS)
                if key in Settings.__struct_fields__:
                    hint = 'it belongs below "agent"'
                raise DocumentError(f"{name}: {key}: unknown key: {hint}")
    except DocumentError as error:
        return _kept(before, dict.fromkeys(SECTIONS, str(error)))
    readers: dict[str, Callable[[object, str], Any]] = {
        "agent": _settings,
        PART: rules.of,
        store_choice.PART: store_choice.of,
    }
    read, mistakes = {}, {}
    for section in SECTIONS:
        try:
            read[section] = readers[section](whole.get(section), name)
        except DocumentError as error:
            mistakes[section] = str(error)
    return _kept(before, mistakes, **read)


def _kept(
    before: Loaded,
    mistakes: Mapping[str, str],
    *,
    agent: Settings | None = None,
    policy: Policy | None = None,
    ipam: AddressSettings | None = None,
) -> Loaded:
    """For each section with a mistake, use the settings in `before`."""
    old = before.settings
    return Loaded(
        msgspec.structs.replace(agent or old, policy=policy or old.policy, ipam=ipam or old.ipam),
        mistakes,
        before.unread & mistakes.keys(),
    )


def listen_address(listen: str, *, local: bool = True) -> Path | tuple[str, int] | None:
    """Parse `listen` into a socket's path, or an address and a port. Returns `None` if it is empty.

    Raises ValueError with the remedy. If `local`, an address must be a loopback address.
    """
    if not listen:
        return None
    if listen.startswith(UNIX):
        path = listen.removeprefix(UNIX)
        if not path.startswith("/") or "\0" in path:
            raise ValueError('write an absolute path behind "unix:"')
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
            raise ValueError(f'write a path of at most {_MAX_SOCKET_PATH} bytes behind "unix:"')
        return Path(path)
    host, colon, port = listen.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        address = address_text.address(host[1:-1] if bracketed else host)
    except ValueError:
        address = None
    number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else 65536
    if address is None or not colon or bracketed is not (address.version == 6) or number > 65535:
        raise ValueError(
            'write "127.0.0.1:9810", "[::1]:9810", "unix:/path", or "" for no endpoint'
        )
    if local and not address.is_loopback():
        raise ValueError(
            "the endpoint does not authenticate clients: write a loopback address (127.0.0.1, "
            "[::1]) or a unix socket, and use a proxy for clients on other machines"
        )
    return str(address), number


def reload(path: Path, before: Loaded) -> Loaded:
    """Read the file again, and log its differences from `before`."""
    new = load(path, before)
    log_mistakes(new, before.mistakes)
    for section in sorted(before.mistakes.keys() - new.mistakes.keys()):
        _log.info("%s: %s: can be used again", path, section)
    if new.settings != before.settings:
        _log.info("%s: %s", path, _difference(before.settings, new.settings))
    return new


def log_mistakes(loaded: Loaded, known: Mapping[str, str] = NOTHING.mistakes) -> None:
    """Log each mistake that is not in `known`. The line also has the mistake's effect."""
    sections: dict[str, list[str]] = {}
    for section, text in loaded.mistakes.items():
        if known.get(section) != text:
            sections.setdefault(text, []).append(section)
    for text, of in sections.items():
        kept = [section for section in of if section not in loaded.unread]
        closed = [_CLOSED[section] for section in of if section in loaded.unread]
        if kept:
            closed.append(f"{', '.join(kept)}: the last correct settings stay")
        _log.error("%s (until it is corrected: %s)", text, "; ".join(closed))


def _difference(old: Settings, new: Settings) -> str:
    changes = []
    for key in Settings.__struct_fields__:
        before, after = getattr(old, key), getattr(new, key)
        if before != after and key == PART:
            changes.append("the rules of policy have changed")
        elif before != after:
            later = " (when the agent starts again)" if key in AT_START_ONLY else ""
            changes.append(f"{key} was {before!r}, is {after!r}{later}")
    return "; ".join(changes)


def _settings(part: object, name: str) -> Settings:
    shapes = typing.get_type_hints(Settings, include_extras=True)
    for part_of_file in ("policy", "ipam"):  # these keys do not belong to `agent`
        del shapes[part_of_file]
    values = documents.fields(part, shapes, f"{name}: agent")
    if "listen" in values:
        try:
            listen_address(values["listen"])
        except ValueError as error:
            listen = documents.shown(values["listen"])
            raise DocumentError(f"{name}: agent.listen: {listen}: {error}") from None
    return Settings(**values)
