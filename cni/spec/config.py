"""Decodes network configurations, and caches the latest configurations.

An ADD, CHECK or STATUS is refused if its configuration exceeds the limits (`limits`). In that case
a DEL or GC decodes only the keys that a removal needs.
"""

import re
from collections.abc import Callable, Collection, Mapping
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import msgspec

from base import decoding
from base.text import resembling
from base.types import DeviceId, PKey
from cni.spec import limits
from cni.spec.errors import CNIError, Code, invalid_config
from cni.spec.limits import MAX_KEYS, not_decoded

T = TypeVar("T")

DEVICE_ID_PATHS = ("deviceID", "runtimeConfig.deviceID", "pciBusID")
"""Multus writes the kubelet's device id to each of these paths."""

VALID_ATTACHMENTS = ("cni.dev/valid-attachments", "cni.dev/attachments")
"""The keys of a GC's list. SPEC.md 1.1.0 has the second key; libraries send one key or both."""

# The keys that an IPAM plugin reads, as the specification spells them.
_IPAM_KEYS = {
    key.casefold(): key
    for key in ("args", "cniVersion", "dns", "ipam", "name", "prevResult", "runtimeConfig", "type")
}
_TOO_LONG = re.compile(r"Expected `array` of length <= (\d+)")
_TOO_LARGE = re.compile(r"Expected `[^`]*`, got `raw`")  # a number that fits no float

# Keys of the runtime, libcni, Multus and KubeVirt, which the configuration of any plugin may have
# (SPEC.md section 1).
RUNTIME_KEYS = frozenset(
    (
        *("cniVersion", "cniVersions", "name", "type", "args", "capabilities", "runtimeConfig"),
        *("prevResult", "ipam", "dns", "ipMasq", "allowPersistentIPs", "disableCheck"),
        *("disableGC", "deviceID", "pciBusID"),
    )
)

_NETWORK_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.\-]*")
# JSON escapes of UTF-16 surrogates. Python's decoder accepts half of a pair.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_ABSENT = msgspec.Raw()

_KEPT = 32  # configurations
_LARGEST_KEPT = 4 << 10  # bytes; a decoded configuration of this size takes up to 100 KiB

SERVED = ("podfabric-ipam", "whereabouts", "nv-ipam")
"""The types of IPAM plugins that podfabric serves, its own type first."""


class ValidAttachment(msgspec.Struct, frozen=True):
    """An attachment that the runtime lists as valid."""

    containerID: str
    ifname: str


class IpamConfig(msgspec.Struct, frozen=True):
    """The value of "ipam". `type` is "" without an IPAM plugin. `options` has all keys of "ipam".

    `ambiguous` is a key that Go would read differently, because Go ignores the case of keys.
    """

    type: str = ""
    options: dict[str, Any] = {}
    ambiguous: str | None = None


class NetworkConfig(msgspec.Struct, frozen=True, dict=True):
    """One network configuration. It is immutable, because calls may share it.

    `raw` has the runtime's bytes, for delegates. In `keys` a number too large for a float is a
    msgspec.Raw. `whole` is False if `keys` has only the keys that a removal needs.
    """

    raw: bytes = b"{}"
    keys: dict[str, Any] = {}
    whole: bool = True

    @property
    def version(self) -> str:
        """The "cniVersion", by default 0.1.0. Raises CNIError 6 if it is not a string."""
        return self.text("cniVersion") or "0.1.0"

    def text(self, key: str) -> str:
        """The string at a top-level key, or "". Raises CNIError 6 for another type."""
        value = self.keys.get(key, "")
        if isinstance(value, str):
            return value
        try:
            return msgspec.convert(value, str)
        except msgspec.ValidationError as error:
            raise CNIError(
                Code.DECODING_FAILURE, f'"{key}": {error}: put the value in quotes'
            ) from None

    @cached_property
    def network(self) -> str:
        """The network's name. Raises CNIError 7 if it is invalid, 6 if it is not a string."""
        name = self.text("name")
        if name == "":
            raise invalid_config('"name" is missing: give the network a name')
        if not _NETWORK_NAME.fullmatch(name):
            raise invalid_config(
                f'"name": "{name}" is invalid: use letters, digits, "_", "." and "-", and '
                "begin with a letter or digit"
            )
        return name

    def derived(self, make: Callable[["NetworkConfig"], T]) -> T:
        """The cached result of `make`.

        The result must be immutable and depend only on the configuration.
        """
        if make not in self._derived:
            self._derived[make] = make(self)
        answer: T = self._derived[make]
        return answer

    @cached_property
    def _derived(self) -> dict[Callable[["NetworkConfig"], Any], Any]:
        return {}

    def at(self, path: str, shape: type[T]) -> T | None:
        """The value at a path such as "runtimeConfig.mac", or `None`. Raises CNIError 7."""
        value: Any = self.keys
        walked: list[str] = []
        for key in path.split("."):
            if not isinstance(value, dict):
                value = convert(value, dict[str, Any], ".".join(walked))
            value = value.get(key)
            if value is None:
                return None
            walked.append(key)
        return convert(value, shape, path)

    @cached_property
    def ipam(self) -> IpamConfig:
        """The value of "ipam". A value of the wrong type counts as missing."""
        options = self.keys.get("ipam")
        ipam_type = options.get("type") if isinstance(options, dict) else None
        if not self.whole:
            return IpamConfig(ipam_type or "", ambiguous="ipam")
        ambiguous = _misspelt(self.keys) or _repeated(options)
        if not isinstance(options, dict) or not isinstance(ipam_type, str):
            return IpamConfig(ambiguous=ambiguous)
        return IpamConfig(ipam_type, options, ambiguous)

    @cached_property
    def valid_attachments(self) -> frozenset[tuple[str, str]] | None:
        """The (container id, ifname) pairs that a GC lists as valid, or `None` without a list.

        CRI-O sends null for a network without pods. Null and [] mean that no attachment is valid.
        Raises CNIError 7 for a list of another shape.
        """
        for key in VALID_ATTACHMENTS:
            if key in self.keys:
                return _read_attachments(key, self.keys[key])
        return None

    def device_id(self) -> DeviceId:
        """The device id, or "". Raises CNIError 7 if keys name several devices."""
        ids = self.device_ids()
        if len(set(ids.values())) > 1:
            listed = ", ".join(f'"{path}" is "{device_id}"' for path, device_id in ids.items())
            raise invalid_config(f"{listed}: write one device into all these keys, or keep one key")
        return next(iter(ids.values()), DeviceId(""))

    def device_ids(self) -> dict[str, DeviceId]:
        """The device ids by path. Raises CNIError 7 if a device id is not a string."""
        texts = {path: self.at(path, str) for path in DEVICE_ID_PATHS}
        return {path: DeviceId(text) for path, text in texts.items() if text}


def decode(raw: bytes) -> NetworkConfig:
    """The configuration of an ADD, CHECK or STATUS. Raises CNIError 6 and 7."""
    # A configuration with the result of an ADD belongs to one pod, so caching it is useless.
    if len(raw) > _LARGEST_KEPT or b'"prevResult"' in raw:
        return _decode(raw)
    return _kept(raw)


def _decode(raw: bytes) -> NetworkConfig:
    document = limits.decode(raw)
    try:
        if _SURROGATE.search(raw):
            decoding.decode(raw, msgspec.Raw)  # refuses half of a pair
        if document is None:  # null counts as an object without keys, as in the reference
            return NetworkConfig(raw)
        return NetworkConfig(raw, msgspec.convert(document, dict[str, Any]))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise not_decoded(error) from None


_kept = lru_cache(_KEPT)(_decode)


def decode_for_removal(raw: bytes) -> NetworkConfig:
    """The configuration of a DEL or GC. Raises CNIError 6 if it is not a JSON object."""
    limits.require_readable(raw)
    try:
        return decode(raw)
    except CNIError:
        return _decode_parts(raw)


class _IpamParts(msgspec.Struct):
    type: msgspec.Raw = _ABSENT


class _RuntimeParts(msgspec.Struct):
    deviceID: msgspec.Raw = _ABSENT


class _RemovalParts(msgspec.Struct):
    """The keys that a removal needs. msgspec skips all other keys."""

    name: str = ""
    cniVersion: msgspec.Raw = _ABSENT
    deviceID: msgspec.Raw = _ABSENT
    pciBusID: msgspec.Raw = _ABSENT
    ipam: msgspec.Raw = _ABSENT
    runtimeConfig: msgspec.Raw = _ABSENT
    valid: msgspec.Raw = msgspec.field(name=VALID_ATTACHMENTS[0], default=_ABSENT)
    attachments: msgspec.Raw = msgspec.field(name=VALID_ATTACHMENTS[1], default=_ABSENT)


def _decode_parts(raw: bytes) -> NetworkConfig:
    """The keys that a removal needs. The lists of attachments stay JSON until a GC reads them."""
    try:
        raw.decode()  # checks the UTF-8 of all texts; msgspec checks no text that it skips
        parts = decoding.decode(raw, _RemovalParts)
    except (UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise not_decoded(error) from None
    keys: dict[str, Any] = {"name": parts.name}
    if parts.cniVersion is not _ABSENT:
        keys["cniVersion"] = _text(parts.cniVersion)
    for key in ("deviceID", "pciBusID"):
        keys[key] = _text(getattr(parts, key))
    keys["ipam"] = _texts(parts.ipam, _IpamParts)
    keys["runtimeConfig"] = _texts(parts.runtimeConfig, _RuntimeParts)
    for key, value in zip(VALID_ATTACHMENTS, (parts.valid, parts.attachments), strict=True):
        if value is not _ABSENT:
            keys[key] = value
    return NetworkConfig(raw, keys, whole=False)


def _texts(raw: msgspec.Raw, shape: type[msgspec.Struct]) -> dict[str, str]:
    """The string fields of a JSON object. Empty if `raw` is not an object."""
    try:
        parts = decoding.decode(raw, shape)
    except msgspec.MsgspecError:
        return {}
    texts = {field: _text(getattr(parts, field)) for field in shape.__struct_fields__}
    return {field: text for field, text in texts.items() if text is not None}


def _text(raw: msgspec.Raw) -> str | None:
    try:
        return decoding.decode(raw, str)
    except msgspec.MsgspecError:
        return None


def _misspelt(keys: dict[str, Any]) -> str | None:
    """A key that equals a key of the specification only if case is ignored, or `None`."""
    return next((key for key in keys if _IPAM_KEYS.get(key.casefold(), key) != key), None)


def _repeated(options: object) -> str | None:
    """A key that an object in the options has twice, in spellings that differ only in case."""
    waiting = [options]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            seen: set[str] = set()
            repeated: set[str] = set()
            for key in map(str.casefold, value):
                (repeated if key in seen else seen).add(key)
            if repeated:
                return f"ipam: {min(repeated)}"
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return None


def _read_attachments(key: str, value: object) -> frozenset[tuple[str, str]]:
    try:
        if isinstance(value, msgspec.Raw):  # the configuration is not whole
            value = decoding.decode(value, object)
        valid = msgspec.convert(value, type=tuple[ValidAttachment, ...] | None)
    except msgspec.MsgspecError as error:
        raise invalid_config(f'"{key}": {error}: GC removed nothing') from None
    return frozenset((attachment.containerID, attachment.ifname) for attachment in valid or ())


def convert(value: Any, shape: type[T], path: str = "$") -> T:  # noqa: ANN401 - any JSON value
    """Convert the JSON value at `path` to `shape`. Raises CNIError 7."""
    try:
        return msgspec.convert(value, type=shape)
    except msgspec.MsgspecError as error:
        raise _explained(error, path) from None


def unknown_key(key: str, valid: Collection[str], where: str) -> CNIError:
    """The error for an unknown key, with the most similar valid key."""
    nearest = resembling(key, valid)
    hint = f'did you mean "{nearest}"?' if nearest else f"valid keys are {', '.join(sorted(valid))}"
    return invalid_config(f'{where}unknown key "{key}": {hint}')


def refuse_misspelt(keys: Mapping[str, Any], ours: Collection[str]) -> None:
    """Raise CNIError 7 for a top-level key that looks like a misspelt key of `ours`.

    A plugin that ignored `"pkeys"` would put a pod into the wrong partition. Other unknown keys
    belong to other plugins or the runtime (SPEC.md).
    """
    valid = frozenset(ours) | RUNTIME_KEYS
    others = [key for key in keys if key not in valid and "/" not in key]
    if len(others) > MAX_KEYS:  # each of these keys is compared with each key of ours
        raise invalid_config(
            f"the configuration has {len(others)} unknown keys, at most {MAX_KEYS} are "
            "allowed: remove unknown keys"
        )
    for key in others:
        if resembling(key, ours):
            raise unknown_key(key, ours, "")


def require_interface_name(name: str, key: str) -> None:
    """Raise CNIError 7 if `name`, the value at `key`, is not a valid Linux interface name."""
    size = len(name.encode(errors="replace"))
    if not 0 < size <= 15 or "/" in name or "\0" in name or name in (".", ".."):
        raise invalid_config(
            f'"{key}": "{name}" cannot be the name of an interface: use 1 to 15 bytes without "/"'
        )


def _explained(error: msgspec.MsgspecError, path: str) -> CNIError:
    """The error with the key first. msgspec writes "Expected `int`, got `str` - at `$.mtu`"."""
    said = _TOO_LONG.sub(r"at most \1 entries are allowed: shorten the list", str(error))
    said = _TOO_LARGE.sub("Number out of range", said)
    text, separator, inner = said.rpartition(" - at `")
    if not separator:
        if path == "$":
            return invalid_config(f"invalid configuration: {said}")
        text, inner = said, "$`"
    key = (path + inner.rstrip("`").removeprefix("$")).removeprefix("$.")
    return invalid_config(f'invalid configuration: "{key}": {text.replace("`", "")}')


def pkey(written: int | str | None) -> PKey | None:
    """A P_Key with or without the full-member bit, `None` for "" and `None`. Raises CNIError 7."""
    if written is None or written == "":
        return None
    try:
        return read_pkey(written)
    except ValueError as error:
        raise invalid_config(f'"pkey": {error}') from None


def read_pkey(written: int | str) -> PKey:
    """A P_Key. Raises ValueError, also for a text of four digits, which may mean hexadecimal."""
    text = str(written)
    if isinstance(written, str) and re.fullmatch(r"[0-9]{4}", text):
        raise ValueError(
            f'"{text}" has no 0x: write "0x{text}" if the digits are hexadecimal, '
            f'"{int(text):#06x}" if they are decimal'
        )
    if not re.fullmatch(r"0[xX][0-9a-fA-F]{1,4}|[0-9]{1,5}", text):
        raise ValueError(f'"{text}" is not a P_Key: write a string such as "0x8001", or a number')
    number = int(text, 16) if text[:2] in ("0x", "0X") else int(text)
    if number & 0x7FFF == 0 or number > 0xFFFF:
        raise ValueError(
            f"{text} is out of range: use 0x0001 to 0x7fff, or 0x8001 to 0xffff with the "
            "full-member bit"
        )
    return PKey(number)
