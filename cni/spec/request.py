"""One CNI call as a typed value: environment and standard input, checked in the reference's order.

The order matters to runtimes' tests: each variable's own check precedes the list of missing
ones, the environment precedes standard input, the network's name precedes the version
(reference: pkg/skel/skel.go, pkg/utils/utils.go).
"""

import os
import re
from collections.abc import Callable, Mapping

import msgspec

from cni.spec import limits
from cni.spec.errors import CNIError, Code

MAX_CONFIG_BYTES = 16 * 1024 * 1024
DEFAULT_DELEGATE_DEADLINE = 90.0  # seconds; below kubelet's 2 min for a sandbox

_CONTAINER_ID = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.\-]*")
_NETWORK_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.\-]*")
# Go's unicode.IsSpace; str.isspace() also takes \x1c to \x1f, which interface names may hold.
_SPACE = frozenset("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | frozenset(
    chr(c) for c in range(0x2000, 0x200B)
)

_ATTACHMENT = ("ADD", "CHECK", "DEL")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One call. Strings are as the runtime sent them, "" where it sent none.

    `netns_descriptor` is CNI_NETNS, opened where its path leads somewhere, if it came that way.
    `unanswered_since`: an agent that died may have done this very call since that second.
    """

    command: str
    container_id: str = ""
    netns: str = ""
    ifname: str = ""
    args: str = ""
    path: tuple[str, ...] = ()
    config: bytes = b"{}"
    network: str = ""
    cni_version: str = "0.1.0"
    environ: Mapping[str, str] = msgspec.field(default_factory=dict)
    netns_override: bool = False
    netns_descriptor: int | None = None
    delegate_deadline: float = DEFAULT_DELEGATE_DEADLINE
    unanswered_since: int | None = None


class _Named(msgspec.Struct):
    name: str = ""


class _Versioned(msgspec.Struct):
    cniVersion: str = ""


def read(
    environ: Mapping[str, str],
    read_config: Callable[[], bytes],
    netns_descriptor: int | None = None,
) -> Request:
    """The request that a runtime made; `read_config` gives all of standard input.

    Raises CNIError 4 (environment), 5 (standard input unreadable), 6 (not JSON), 7 (name).
    """
    command = environ.get("CNI_COMMAND", "")
    _check_environment(command, environ)
    try:
        config = read_config()
    except OSError as error:
        raise CNIError(Code.IO_FAILURE, f"error reading from stdin: {error}") from None
    if command in ("DEL", "GC"):
        limits.require_readable(config)
    else:
        limits.require_moderate(config)
    network = _network_name(config)
    return Request(
        command=command,
        container_id=environ.get("CNI_CONTAINERID", ""),
        netns=environ.get("CNI_NETNS", ""),
        ifname=environ.get("CNI_IFNAME", ""),
        args=environ.get("CNI_ARGS", ""),
        path=tuple(entry for entry in environ.get("CNI_PATH", "").split(":") if entry),
        config=config,
        network=network,
        environ=dict(environ),
        netns_override=environ.get("CNI_NETNS_OVERRIDE", "").upper() in ("TRUE", "1"),
        netns_descriptor=netns_descriptor,
        delegate_deadline=_deadline(environ),
    )


def config_version(config: bytes) -> str:
    """The configuration's cniVersion, 0.1.0 where there is none; CNIError 6 if it is no string."""
    try:
        return msgspec.json.decode(config, type=_Versioned).cniVersion or "0.1.0"
    except msgspec.MsgspecError as error:
        raise CNIError(
            Code.DECODING_FAILURE, f"decoding version from network config: {error}"
        ) from None


def _check_environment(command: str, environ: Mapping[str, str]) -> None:
    required: dict[str, tuple[tuple[str, ...], Callable[[str], None] | None]] = {
        "CNI_CONTAINERID": (_ATTACHMENT, _check_container_id),
        "CNI_NETNS": (("ADD", "CHECK"), None),
        "CNI_IFNAME": (_ATTACHMENT, check_interface_name),
        "CNI_PATH": ((*_ATTACHMENT, "GC", "STATUS"), None),
    }
    missing = []
    for name, (commands, check) in required.items():
        if command not in commands:
            continue
        value = environ.get(name, "")
        if value == "":
            missing.append(name)
        elif check is not None:
            check(value)
    if missing:
        raise CNIError(
            Code.INVALID_ENVIRONMENT, f"required env variables [{','.join(missing)}] missing"
        )


def _check_container_id(value: str) -> None:
    if not _CONTAINER_ID.fullmatch(value):
        error = CNIError(Code.INVALID_ENVIRONMENT, "invalid characters in containerID")
        error.details = value  # as it is: no tenant writes it, and the reference answers it so
        raise error


def check_interface_name(value: str) -> None:
    """Linux' rule for interface names, with the reference's messages (CNIError 4)."""
    if len(os.fsencode(value)) > 15:
        raise CNIError(
            Code.INVALID_ENVIRONMENT,
            "interface name is too long",
            "interface name should be less than 16 characters",
        )
    if value in (".", ".."):
        raise CNIError(Code.INVALID_ENVIRONMENT, "interface name is . or ..")
    if any(c in "/:" or c in _SPACE for c in value):
        raise CNIError(
            Code.INVALID_ENVIRONMENT,
            "interface name contains / or : or whitespace characters",
        )


def _network_name(config: bytes) -> str:
    if config.strip() == b"null":
        raise CNIError(Code.INVALID_CONFIG, "missing network name")
    try:
        config.decode()  # all of it: the decoder passes over what it does not read
        name = msgspec.json.decode(config, type=_Named).name
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CNIError(Code.DECODING_FAILURE, f"error unmarshall network config: {error}") from None
    if name == "":
        raise CNIError(Code.INVALID_CONFIG, "missing network name")
    if not _NETWORK_NAME.fullmatch(name):
        raise CNIError(Code.INVALID_CONFIG, "invalid characters found in network name", name)
    return name


def _deadline(environ: Mapping[str, str]) -> float:
    given = environ.get("PODFABRIC_DELEGATE_DEADLINE", "")
    if not given:
        return DEFAULT_DELEGATE_DEADLINE
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 3600:
        raise CNIError(
            Code.INVALID_ENVIRONMENT,
            f'PODFABRIC_DELEGATE_DEADLINE is "{given}": give seconds, more than 0, at most 3600',
        )
    return seconds
