"""The part `ipam` of a network configuration: which IPAM plugin, and with which options."""

import json
from typing import Any

import msgspec

from cni.spec.request import Request


class IpamConfig(msgspec.Struct, frozen=True):
    """`type` is "" where no IPAM plugin is named. `options` has all keys, `type` too.

    A number among them is the text that stands in the configuration: its plugin reads it.
    """

    type: str = ""
    options: dict[str, Any] = {}


def ipam_of(request: Request) -> IpamConfig:
    """The part of a request. What cannot be read, in a DEL or GC, is as if it were not there.

    An ADD's configuration has been read already, with an error for what is wrong with it.
    """
    try:
        # Not msgspec: it refuses numbers beyond a float, which others' plugins may take.
        network = json.loads(request.config, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return IpamConfig()
    options = network.get("ipam") if isinstance(network, dict) else None
    if not isinstance(options, dict) or not isinstance(options.get("type"), str):
        return IpamConfig()
    return IpamConfig(options["type"], options)
