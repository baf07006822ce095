"""The rules of one node: safe defaults, and what config.yaml changes of them.

    policy:
      log_directories: [/var/log/podfabric]
      whole_pfs: true

docs/security.md has the table for administrators.
"""

import typing
from collections.abc import Callable
from pathlib import Path

import msgspec

from base import documents
from base.documents import DocumentError
from cni.spec.errors import CNIError, Code

PART = "policy"
"""The top-level key of config.yaml."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What network configurations may ask for on this node. The defaults are the safe ones."""

    log_directories: tuple[str, ...] = ()  # where "log_file" may be
    resolv_conf_directories: tuple[str, ...] = ()  # where "resolvConf" may be
    # IPAM plugins of others that may be started, if their executable is installed.
    ipam_types: tuple[str, ...] = ("dhcp", "host-local", "static", "whereabouts")
    ipam_directories: tuple[str, ...] = ()  # where paths in the options of those may lead
    unmatched_devices: bool = False  # "match_device": false
    whole_pfs: bool = False  # "pfOnly": true
    # A device of a device plugin, named by a configuration whose pod was not given it.
    unassigned_devices: bool = False
    # A private range ("network_name") whose addresses another network uses on the same link.
    private_ranges: bool = False


Source = Callable[[], Policy]
"""Answers the rules that are in force now. Raises CNIError where they cannot be read."""


def on_node(path: Path) -> Source:
    """The rules in the configuration file at `path`, read at each call: for a one-call process."""

    def read() -> Policy:
        try:
            return load(path)
        except DocumentError as error:
            raise CNIError(
                Code.IO_FAILURE,
                f"{error}: nothing was done, since the rules of this node are in that file",
            ) from None
        except OSError as error:
            raise CNIError(
                Code.IO_FAILURE,
                f"{path}: cannot be read: {error.strerror}: nothing was done, since the rules of "
                "this node are in that file",
            ) from None

    return read


def load(path: Path) -> Policy:
    """The rules in that file; the defaults where there is none. Raises DocumentError, OSError."""
    try:
        content = documents.read(path)
    except (FileNotFoundError, NotADirectoryError):
        return Policy()
    whole = documents.mapping(documents.decode(content, str(path)), str(path))
    return of(whole.get(PART), str(path))


def of(part: object, name: str) -> Policy:
    """The rules in the part `policy`; `name` is the file, for the errors (DocumentError)."""
    shapes = typing.get_type_hints(Policy, include_extras=True)
    where = f"{name}: {PART}"
    values = documents.fields(part, shapes, where)
    for key in ("log_directories", "resolv_conf_directories", "ipam_directories"):
        for index, directory in enumerate(values.get(key, ())):
            if not directory.startswith("/") or "\0" in directory:
                raise DocumentError(
                    f"{where}.{key}[{index}]: {documents.shown(directory)}: write an absolute path"
                )
    return Policy(**values)


def not_allowed(what: str, setting: str, remedy: str = "remove it") -> CNIError:
    """The error for what the rules do not allow: `what` names the key, `setting` the rule."""
    return CNIError(
        Code.NOT_ALLOWED,
        f"{what} is not allowed on this node: {remedy}, or ask the administrator, who can set "
        f'"{PART}.{setting}" in config.yaml',
    )
