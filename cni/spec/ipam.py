"""The part `ipam` of a network configuration: which IPAM plugin, and with which options."""

import json
from typing import Any

import msgspec

from cni.spec import limits
from cni.spec.errors import CNIError
from cni.spec.request import Request

# What an IPAM plugin reads of a configuration, as the specification spells it.
_KEYS = {
    key.casefold(): key
    for key in ("args", "cniVersion", "dns", "ipam", "name", "prevResult", "runtimeConfig", "type")
}


class IpamConfig(msgspec.Struct, frozen=True):
    """`type` is "" where no IPAM plugin is named. `options` has all keys, `type` too.

    A number among them is the text that stands in the configuration: its plugin reads it.
    `ambiguous` is a key that another reader may take for another one, "" if there is none: Go's
    decoder, which others' plugins use, does not tell upper and lower case of keys apart, and
    merges what stands under both.
    """

    type: str = ""
    options: dict[str, Any] = {}
    ambiguous: str = ""


def ipam_of(request: Request) -> IpamConfig:
    """The part of a request. What cannot be read, in a DEL or GC, is as if it were not there.

    An ADD's configuration has been read already, with an error for what is wrong with it. One
    beyond the limits of an ADD, which a DEL may have, is not decoded: it is ambiguous.
    """
    try:
        limits.require_moderate(request.config)
    except CNIError:
        return IpamConfig(_type_in(request.config), ambiguous="ipam")
    # Not msgspec: it refuses numbers beyond a float, which others' plugins may take.
    network = json.loads(request.config, object_pairs_hook=_Object, parse_int=str, parse_float=str)
    if not isinstance(network, _Object):
        return IpamConfig()
    options = network.get("ipam")
    ambiguous = _misspelt(network) or _repeated(options)
    if not isinstance(options, dict) or not isinstance(options.get("type"), str):
        return IpamConfig(ambiguous=ambiguous)
    return IpamConfig(options["type"], options, ambiguous)


def _type_in(config: bytes) -> str:
    try:
        part = msgspec.json.decode(config, type=_Network).ipam
    except msgspec.MsgspecError:
        return ""
    return part.type if part is not None else ""


class _Named(msgspec.Struct):
    type: str = ""


class _Network(msgspec.Struct):
    ipam: _Named | None = None


class _Object(dict[str, Any]):
    """A JSON object that knows which of its keys stands in it more than once, in any case."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.repeated: set[str] = set()
        seen: set[str] = set()
        for key, _ in pairs:
            folded = key.casefold()
            if folded in seen:
                self.repeated.add(folded)
            seen.add(folded)


def _misspelt(network: _Object) -> str:
    """A key of the specification in other letters, or twice."""
    for key in network:
        exact = _KEYS.get(key.casefold(), key)
        if key != exact or (key.casefold() in _KEYS and key.casefold() in network.repeated):
            return key
    return ""


def _repeated(options: object) -> str:
    """A key that an object of the options has twice."""
    waiting = [options]
    while waiting:
        value = waiting.pop()
        if isinstance(value, _Object):
            if value.repeated:
                return f"ipam: {min(value.repeated)}"
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return ""
