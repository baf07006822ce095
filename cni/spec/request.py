"""One CNI call as a typed value, read from environment and standard input.

The checks have the order of the reference (pkg/skel/skel.go, pkg/utils/utils.go), because tests of
runtimes depend on the order.
"""

import os
import re
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from typing import Any

import msgspec

from base.pod import Pod
from cni.spec import result
from cni.spec.config import NetworkConfig, decode, decode_for_removal
from cni.spec.errors import CNIError, Code
from cni.spec.limits import MAX_ARGS
from cni.spec.result import Result

MAX_CONFIG_BYTES = 16 * 1024 * 1024

_SECONDS = re.compile("[0-9]{1,12}")
_CONTAINER_ID = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.\-]*")
# Go's unicode.IsSpace. str.isspace() also accepts \x1c to \x1f, which interface names may have.
_SPACE = frozenset("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | frozenset(
    chr(c) for c in range(0x2000, 0x200B)
)

_ATTACHMENT = ("ADD", "CHECK", "DEL")


class Arguments(msgspec.Struct, frozen=True):
    """The values of CNI_ARGS. A missing text is "". `ip` and `gateway` may be lists with commas."""

    pod: Pod = Pod()
    ip: str = ""
    gateway: str = ""
    mac: str = ""


_KEYS = frozenset(
    (
        *("IP", "GATEWAY", "MAC"),
        *("K8S_POD_NAMESPACE", "K8S_POD_NAME", "K8S_POD_INFRA_CONTAINER_ID", "K8S_POD_UID"),
    )
)


class Request(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One call. A string is the runtime's value, or "" if the runtime sent none.

    `netns_descriptor` is CNI_NETNS, which the launcher opened in its mount namespace. If an agent
    died during this call, `unanswered_since` is the call's start as a Unix time. An ADD for several
    interfaces makes a request for each, and `rail_of` is the name of the first.
    """

    command: str
    container_id: str = ""
    netns: str = ""
    ifname: str = ""
    args: str = ""
    path: tuple[str, ...] = ()
    config: NetworkConfig = NetworkConfig()
    network: str = ""
    cni_version: str = "0.1.0"
    environ: Mapping[str, str] = msgspec.field(default_factory=dict)
    netns_override: bool = False
    netns_descriptor: int | None = None
    delegate_deadline: float = 90.0  # seconds; below kubelet's 2 min for a sandbox
    unanswered_since: int | None = None
    rail_of: str = ""

    @cached_property
    def arguments(self) -> Arguments:
        """The values in CNI_ARGS. Raises CNIError 4, so a DEL must not read this property."""
        return parse_arguments(self.args)

    def with_keys(self, keys: Mapping[str, Any]) -> "Request":
        """The same call with these keys added to `config.keys`. `config.raw` does not change."""
        if not keys:
            return self
        config = msgspec.structs.replace(self.config, keys={**self.config.keys, **keys})
        return msgspec.structs.replace(self, config=config)

    @cached_property
    def previous_result(self) -> Result | None:
        """The "prevResult", if any. Raises CNIError 6 if it is not a result of this version."""
        document = self.config.keys.get("prevResult")
        return None if document is None else result.convert(document, self.cni_version)


def read(
    environ: Mapping[str, str],
    read_config: Callable[[], bytes],
    netns_descriptor: int | None = None,
) -> Request:
    """The request of a runtime. `read_config` returns all of standard input.

    Raises CNIError 4 for the environment, 5 or 6 for standard input, 7 for the configuration.
    """
    command = environ.get("CNI_COMMAND", "")
    _check_environment(command, environ)
    try:
        raw = read_config()
    except OSError as error:
        raise CNIError(Code.IO_FAILURE, f"error reading from stdin: {error}") from None
    config = decode_for_removal(raw) if command in ("DEL", "GC") else decode(raw)
    return of_environ(environ, config, config.network, netns_descriptor)


def of_environ(
    environ: Mapping[str, str],
    config: NetworkConfig,
    network: str,
    netns_descriptor: int | None = None,
) -> Request:
    """Make a request from these environment variables without checking them."""
    since = environ.get("PODFABRIC_UNANSWERED_SINCE", "")  # set by cni/launcher/launcher.c
    return Request(
        command=environ.get("CNI_COMMAND", ""),
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
        unanswered_since=int(since) if _SECONDS.fullmatch(since) else None,
    )


def _check_environment(command: str, environ: Mapping[str, str]) -> None:
    missing = []
    for name, commands, check in _REQUIRED:
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
        error.details = value  # unescaped, as in the reference: no tenant writes a container id
        raise error


@lru_cache(256)  # nearly all pods use the same few names
def check_interface_name(value: str) -> None:
    """Check a name by Linux's rule. Raises CNIError 4 with the reference's messages."""
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


# For each variable, the commands that need the variable, and the check of its value.
_REQUIRED: tuple[tuple[str, tuple[str, ...], Callable[[str], None] | None], ...] = (
    ("CNI_CONTAINERID", _ATTACHMENT, _check_container_id),
    ("CNI_NETNS", ("ADD", "CHECK"), None),
    ("CNI_IFNAME", _ATTACHMENT, check_interface_name),
    ("CNI_PATH", (*_ATTACHMENT, "GC", "STATUS"), None),
)


def parse_arguments(args: str) -> Arguments:
    """Read CNI_ARGS, `KEY=VALUE;KEY=VALUE`, by the reference's rules (pkg/types/args.go).

    Raises CNIError 4 for an invalid text, and for an unknown key unless IgnoreUnknown is true.
    """
    if args == "":
        return Arguments()
    if len(args) > MAX_ARGS:
        raise CNIError(
            Code.INVALID_ENVIRONMENT,
            f"CNI_ARGS has {len(args)} characters, at most {MAX_ARGS} are allowed: shorten it",
        )
    pairs: dict[str, str] = {}
    unknown = []
    ignore_unknown = False
    for pair in args.split(";"):
        key, separator, value = pair.partition("=")
        if not separator or "=" in value:
            raise CNIError(Code.INVALID_ENVIRONMENT, f'ARGS: invalid pair "{pair}"')
        if key == "IgnoreUnknown":
            ignore_unknown = _boolean(value)
        elif key in _KEYS:
            pairs[key] = value
        else:
            unknown.append(pair)
    if unknown and not ignore_unknown:
        listed = " ".join(f'"{pair}"' for pair in unknown)
        raise CNIError(Code.INVALID_ENVIRONMENT, f"ARGS: unknown args [{listed}]")
    return Arguments(
        pod=Pod(
            namespace=pairs.get("K8S_POD_NAMESPACE", ""),
            name=pairs.get("K8S_POD_NAME", ""),
            uid=pairs.get("K8S_POD_UID", ""),
        ),
        ip=pairs.get("IP", ""),
        gateway=pairs.get("GATEWAY", ""),
        mac=pairs.get("MAC", ""),
    )


def _boolean(value: str) -> bool:
    if value == "1" or value.lower() == "true":
        return True
    if value == "0" or value.lower() == "false":
        return False
    raise CNIError(
        Code.INVALID_ENVIRONMENT, f"ARGS: boolean unmarshal error: invalid input {value}"
    )
