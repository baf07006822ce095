"""Results. Only this module reads and writes versions older than the newest.

`encode` writes a result in the runtime's version. `decode` reads a delegate's result, and `convert`
reads a `prevResult`. The rules are the reference's (pkg/types/{020,040,100}). For example, fields
of 1.1 stay in a 1.0.0 result.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from base import address_text
from cni.spec import limits
from cni.spec.errors import CNIError, Code

FAMILY_020 = ("0.1.0", "0.2.0")
FAMILY_040 = ("0.3.0", "0.3.1", "0.4.0")
FAMILY_100 = ("1.0.0", "1.1.0")


# msgspec's errors for bytes that are not JSON of the given shape.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


@lru_cache(1024)  # one ADD reads the same addresses several times
def _cidr(text: str) -> str:
    """An address with its prefix in canonical text. An IPv4-mapped address becomes IPv4."""
    return str(address_text.network(text))


@lru_cache(1024)
def _ip(text: str) -> str:
    return str(address_text.address(text))


_DNSEntries = Annotated[tuple[str, ...], Meta(max_length=limits.DNS_ENTRIES)]


class DNS(msgspec.Struct, frozen=True, omit_defaults=True):
    nameservers: _DNSEntries = ()
    domain: str = ""
    search: _DNSEntries = ()
    options: _DNSEntries = ()


class Interface(msgspec.Struct, frozen=True, omit_defaults=True):
    """An interface. `rdmaDevice` and its `uverbs` are our additions to the specification."""

    name: str
    mac: str = ""
    mtu: int = 0
    sandbox: str = ""
    socketPath: str = ""
    pciID: str = ""
    rdmaDevice: str = ""
    uverbs: str = ""


class IPConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """An address with its prefix. `interface` is an index into the result's interfaces."""

    address: str
    gateway: str | None = None
    interface: int | None = None

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "address", _cidr(self.address))
        if self.gateway is not None:
            msgspec.structs.force_setattr(
                self, "gateway", _ip(self.gateway) if self.gateway else None
            )

    @property
    def family(self) -> int:
        return 6 if ":" in self.address else 4


_U8 = Annotated[int, Meta(ge=0, le=0xFF)]
_U32 = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]


class Route(msgspec.Struct, frozen=True, omit_defaults=True):
    """A route. Each number fits its field in rtnetlink's messages."""

    dst: str
    gw: str | None = None
    mtu: _U32 = 0
    advmss: _U32 = 0
    priority: _U32 = 0
    table: _U32 | None = None
    scope: _U8 | None = None

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "dst", _cidr(self.dst))
        if self.gw is not None:
            msgspec.structs.force_setattr(self, "gw", _ip(self.gw) if self.gw else None)

    @property
    def family(self) -> int:
        return 6 if ":" in self.dst else 4


class Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of an ADD, in the shape of 1.1.0 without the version."""

    interfaces: tuple[Interface, ...] = ()
    ips: tuple[IPConfig, ...] = ()
    routes: tuple[Route, ...] = ()
    dns: DNS = DNS()

    @property
    def cidrs(self) -> list[str]:
        """The addresses, each with its prefix length: "10.0.0.5/24"."""
        return [ip.address for ip in self.ips]


# 0.1.0 and 0.2.0
class _OldRoute(msgspec.Struct, omit_defaults=True):
    dst: str
    gw: str | None = None


class _OldAddress(msgspec.Struct, omit_defaults=True):
    ip: str
    gateway: str | None = None
    routes: Annotated[tuple[_OldRoute, ...], Meta(max_length=limits.ROUTES)] | None = None


class _OldResult(msgspec.Struct, omit_defaults=True):
    ip4: _OldAddress | None = None
    ip6: _OldAddress | None = None
    dns: DNS | None = None


_MAX_INTERFACES = Meta(max_length=limits.INTERFACES)
_MAX_ADDRESSES = Meta(max_length=limits.RESULT_ADDRESSES)
_MAX_ROUTES = Meta(max_length=limits.ROUTES)


class _NullableResult(msgspec.Struct):
    """A result of version 0.3.0 or later. Go writes an empty list as null."""

    interfaces: Annotated[tuple[Interface, ...], _MAX_INTERFACES] | None = None
    ips: Annotated[tuple[IPConfig, ...], _MAX_ADDRESSES] | None = None
    routes: Annotated[tuple[Route, ...], _MAX_ROUTES] | None = None
    dns: DNS | None = None


class _ResultVersion(msgspec.Struct):
    cniVersion: str = ""


_Raws = tuple[msgspec.Raw, ...]


class _ResultCounts(_ResultVersion):
    """A delegate's result with undecoded entries, to check their number first."""

    interfaces: Annotated[_Raws, _MAX_INTERFACES] | None = None
    ips: Annotated[_Raws, _MAX_ADDRESSES] | None = None
    routes: Annotated[_Raws, _MAX_ROUTES] | None = None


def encode(result: Result, version: str) -> bytes:
    """The result as JSON of `version`.

    Raises CNIError 7 if `version` needs an address and the result has none.
    """
    return msgspec.json.encode(to_document(result, version))


def to_document(result: Result, version: str) -> dict[str, Any]:
    version = version or "0.1.0"
    if version in FAMILY_020:
        return {"cniVersion": version, **_to_020(result)}
    document: dict[str, Any] = {"cniVersion": version, **msgspec.to_builtins(result)}
    if not document.get("dns"):  # omit_defaults compares the identity of a nested struct
        document.pop("dns", None)
    if version in FAMILY_100:
        return document
    if version not in FAMILY_040:
        raise CNIError(
            Code.INCOMPATIBLE_VERSION,
            f"no converter for CNI result version 1.1.0 to {version}",
        )
    for interface in document.get("interfaces", ()):
        for key in ("mtu", "socketPath", "pciID", "rdmaDevice", "uverbs"):
            interface.pop(key, None)
    if "ips" in document:
        document["ips"] = [
            {"version": str(ip.family), **msgspec.to_builtins(ip)} for ip in result.ips
        ]
    document.setdefault("dns", {})
    return document


def require_convertible(version: str, *, has_addresses: bool) -> None:
    """Raise CNIError 7 if `version` needs an address, as 0.1.0 does, and the result has none."""
    if version in FAMILY_020 and not has_addresses:
        raise CNIError(
            Code.INVALID_CONFIG,
            "cannot convert: no valid IP addresses (a result of CNI version "
            f'{version} needs an address: set "cniVersion" to "1.0.0", or add "ipam")',
        )


def decode(document: bytes, config_version: str) -> Result:
    """Decode a delegate's result. A result without a version has `config_version`.

    Raises CNIError 6 for an unreadable result, 1 for an unsupported version.
    """
    limits.require_readable(document)
    return _read(partial(msgspec.json.decode, document), _ResultCounts, config_version)


def convert(document: object, config_version: str) -> Result:
    """Like `decode`, for a "prevResult". The version must be of the configuration's family."""
    family = _family(config_version)
    return _read(partial(msgspec.convert, document), _ResultVersion, config_version, family)


def _read(
    read: Callable[..., Any],
    outline: type[_ResultVersion],
    config_version: str,
    required_family: tuple[str, ...] | None = None,
) -> Result:
    """Read a result.

    `read(type=T)` returns the document as T. The first call of `read` has `type=outline`.
    """
    try:
        version = read(type=outline).cniVersion or config_version
        family = required_family or _family(version)
        if version not in family:
            # "" belongs to the oldest family, and the reference prints "" first.
            listed = " ".join((("",) if family is FAMILY_020 else ()) + family)
            raise CNIError(
                Code.DECODING_FAILURE,
                f"result type supports [{listed.strip()}] but unmarshalled CNIVersion is "
                f'"{version}"',
            )
        if family is FAMILY_020:
            return _from_020(read(type=_OldResult))
        lists = read(type=_NullableResult)
    except UNREADABLE as error:
        raise CNIError(Code.DECODING_FAILURE, f"cannot read the result: {error}") from None
    return Result(
        interfaces=lists.interfaces or (),
        ips=lists.ips or (),
        routes=lists.routes or (),
        dns=lists.dns or DNS(),
    )


def after_previous(previous: Mapping[str, Any], result: Result, version: str) -> dict[str, Any]:
    """Our result, added to an earlier plugin's result of the same version family."""
    # A document of the oldest versions needs an address, but we may have none to add.
    empty = version in FAMILY_020 and not result.ips
    ours = {} if empty else to_document(result, version)
    offset = len(previous.get("interfaces") or ())
    for ip in ours.get("ips", ()):
        if "interface" in ip:
            ip["interface"] += offset
    merged = {**ours, **previous, "cniVersion": version}
    for key in ("interfaces", "ips", "routes"):
        both = [*(previous.get(key) or ()), *ours.get(key, ())]
        if both:
            merged[key] = both
    merged["dns"] = ours.get("dns") or previous.get("dns") or {}
    if not merged["dns"] and version in FAMILY_100:
        del merged["dns"]
    return merged


def _family(version: str) -> tuple[str, ...]:
    for family in (FAMILY_020, FAMILY_040, FAMILY_100):
        if (version or "0.1.0") in family:
            return family
    raise CNIError(Code.INCOMPATIBLE_VERSION, f'unsupported CNI result version "{version}"')


def _to_020(result: Result) -> dict[str, Any]:
    old = _OldResult(dns=result.dns)
    for family, key in ((4, "ip4"), (6, "ip6")):
        first = next((ip for ip in result.ips if ip.family == family), None)
        if first is not None:
            routes = tuple(_OldRoute(r.dst, r.gw) for r in result.routes if r.family == family)
            setattr(old, key, _OldAddress(first.address, first.gateway, routes or None))
    if old.ip4 is None and old.ip6 is None:
        raise CNIError(Code.INVALID_CONFIG, "cannot convert: no valid IP addresses")
    document: dict[str, Any] = msgspec.to_builtins(old)
    return document


def _from_020(old: _OldResult) -> Result:
    ips: list[IPConfig] = []
    routes: list[Route] = []
    for config in (old.ip4, old.ip6):
        if config is not None:
            ips.append(IPConfig(config.ip, config.gateway))
            routes += [Route(route.dst, route.gw) for route in config.routes or ()]
    return Result(ips=tuple(ips), routes=tuple(routes), dns=old.dns or DNS())
