"""Reads configurations of `sriov` as a runtime passes them."""

import json
from typing import Any

import pytest

from cni.spec.config import decode
from cni.spec.errors import CNIError
from cni.spec.request import Request
from cni.sriov import options
from cni.sriov.options import SriovOptions

BDF = "0000:af:06.1"
MACS = [f"02:00:00:00:00:0{n}" for n in range(5)]
GUIDS = [f"02:00:00:00:00:00:00:0{n}" for n in range(4)]


def request(config: bytes, cni_args: str = "") -> Request:
    """An ADD with that network configuration."""
    return Request(command="ADD", args=cni_args, config=decode(config), network="n")


def read(cni_args: str = "", **config: Any) -> SriovOptions:  # noqa: ANN401
    """The options of a configuration with `deviceID` BDF, or another one in `config`."""
    document = {"cniVersion": "1.0.0", "name": "n", "type": "sriov", "deviceID": BDF} | config
    return options.read(request(json.dumps(document).encode(), cni_args))


def refusal(cni_args: str = "", **config: Any) -> CNIError:  # noqa: ANN401
    """The error for such a configuration."""
    with pytest.raises(CNIError) as caught:
        read(cni_args, **config)
    return caught.value
