"""The part `ipam` of a network configuration: which IPAM plugin, and with which options."""

from typing import Any

import msgspec

from cni.spec.request import Request

# What an IPAM plugin reads of a configuration, as the specification spells it.
_KEYS = {
    key.casefold(): key
    for key in ("args", "cniVersion", "dns", "ipam", "name", "prevResult", "runtimeConfig", "type")
}


class IpamConfig(msgspec.Struct, frozen=True):
    """`type` is "" if no IPAM plugin is named. `options` has all keys of "ipam", `type` too.

    `ambiguous` is a key that another reader may take for a different one, "" if there is none: Go's
    decoder, which other plugins use, ignores the case of keys and merges what stands under both.
    """

    type: str = ""
    options: dict[str, Any] = {}
    ambiguous: str = ""


def ipam_of(request: Request) -> IpamConfig:
    """The IPAM part of a request. A value that is not as it must be counts as missing.

    A configuration beyond the limits of an ADD, which a DEL may have, is ambiguous: of its options
    only the type was decoded.
    """
    config = request.config
    options = config.keys.get("ipam")
    ipam_type = options.get("type") if isinstance(options, dict) else None
    if not config.whole:
        return IpamConfig(ipam_type or "", ambiguous="ipam")
    ambiguous = _misspelt(config.keys) or _repeated(options)
    if not isinstance(options, dict) or not isinstance(ipam_type, str):
        return IpamConfig(ambiguous=ambiguous)
    return IpamConfig(ipam_type, options, ambiguous)


def _misspelt(keys: dict[str, Any]) -> str:
    """A key of the specification in other letters, or ""."""
    for key in keys:
        if _KEYS.get(key.casefold(), key) != key:
            return key
    return ""


def _repeated(options: object) -> str:
    """A key that an object of the options has twice, in different letters, or ""."""
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
    return ""
