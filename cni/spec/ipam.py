"""The part `ipam` of a network configuration: which IPAM plugin, and with which options."""

from typing import Any

import msgspec

from cni.spec.request import Request


class IpamConfig(msgspec.Struct, frozen=True):
    """`type` is "" where no IPAM plugin is named. `options` has all keys, `type` too."""

    type: str = ""
    options: dict[str, Any] = {}


class _Network(msgspec.Struct):
    ipam: dict[str, Any] | None = None


def ipam_of(request: Request) -> IpamConfig:
    """The part of a request. One that cannot be read is as if there were none.

    A DEL must work with a broken configuration, too; an ADD has been checked before.
    """
    try:
        options = msgspec.json.decode(request.config, type=_Network).ipam or {}
    except msgspec.MsgspecError:
        return IpamConfig()
    named = options.get("type")
    return IpamConfig(named, options) if isinstance(named, str) else IpamConfig()
