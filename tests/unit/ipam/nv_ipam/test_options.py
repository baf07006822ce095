"""nv-ipam's definitions: which pools, and what a pod asks for."""

import pytest

from cni.spec.errors import CNIError, Code
from ipam.nv_ipam.translate import NvIpamOptions, read_options
from tests.unit.ipam.calls import Json, request


def options(
    ipam: Json | None = None,
    cni_args: str = "",
    **config: object,
) -> NvIpamOptions:
    keys = {"type": "nv-ipam"} | dict(ipam or {})
    asked = request("ADD", keys, "c1", network="net", args=cni_args, config=config)
    return read_options(asked.config, asked.arguments)


@pytest.mark.parametrize(
    ("ipam", "pools"),
    [
        ({}, ["ippool/net"]),
        ({"poolName": "a"}, ["ippool/a"]),
        ({"poolName": "a,b"}, ["ippool/a", "ippool/b"]),
        ({"poolName": " a , b,c"}, ["ippool/a", "ippool/b", "ippool/c"]),
        ({"poolName": "a", "poolType": "CIDRPool"}, ["cidrpool/a"]),
        ({"poolName": None, "logFile": "/x", "whatever": [1]}, ["ippool/net"]),
    ],
)
def test_pools_are_named_by_the_definition_or_the_network(ipam: Json, pools: list[str]) -> None:
    assert list(options(ipam).pools) == pools


def test_the_pods_own_pools_go_first() -> None:
    cni = {"poolNames": ["x", "y"], "poolType": "cidrpool"}
    found = options({"poolName": "a"}, args={"cni": cni})
    assert found.pools == ("cidrpool/x", "cidrpool/y")


def test_empty_args_are_no_error() -> None:
    asked = request("ADD", {"type": "nv-ipam"}, "c1", network="net", config={"args": {}})
    assert read_options(asked.config, asked.arguments).pools == ("ippool/net",)


@pytest.mark.parametrize(
    ("ipam", "said"),
    [
        ({"poolName": "a,,b"}, "cannot be the name of a pool"),
        ({"poolName": "a/b"}, "cannot be the name of a pool"),
        ({"poolName": "a,a"}, "names a pool twice"),
        ({"poolType": "pool"}, "set ippool or cidrpool"),
        ({"poolName": 7}, '"ipam.poolName"'),
    ],
)
def test_what_names_no_pool_is_refused(ipam: Json, said: str) -> None:
    with pytest.raises(CNIError) as caught:
        options(ipam)
    assert (caught.value.code, said in caught.value.message) == (Code.INVALID_CONFIG, True)


def test_requested_addresses_are_those_of_the_first_way_that_is_used() -> None:
    cni = {"cni": {"ips": ["10.0.0.6", "10.0.0.6"]}}
    assert ways_of(runtimeConfig={"ips": ["10.0.0.5/24"]}, args=cni) == ["runtimeConfig.ips"]
    assert ways_of(args=cni) == ["args.cni.ips"]
    assert ways_of("IP=10.0.0.7") == ["CNI_ARGS IP"]


def ways_of(cni_args: str = "", **config: object) -> list[str]:
    """How each requested address was asked for."""
    return [where for where, _ in options({}, cni_args, **config).requested]


@pytest.mark.parametrize(
    ("cni", "args", "code"),
    [
        ({"ips": ["10.0.0.6"], "allocateIPWithIndex": 0}, "", Code.INVALID_CONFIG),
        ({"allocateDefaultGateway": True, "allocateIPWithIndex": 3}, "", Code.INVALID_CONFIG),
        ({"allocateDefaultGateway": True}, "IP=10.0.0.6", Code.INVALID_CONFIG),
        ({"allocateIPWithIndex": -1}, "", Code.INVALID_CONFIG),
        ({"ips": ["x"]}, "", Code.INVALID_CONFIG),
        ({}, "IP=x", Code.INVALID_ENVIRONMENT),
    ],
)
def test_requests_that_exclude_each_other_or_are_none(cni: Json, args: str, code: int) -> None:
    with pytest.raises(CNIError) as caught:
        options(cni_args=args, args={"cni": cni})
    assert caught.value.code == code
