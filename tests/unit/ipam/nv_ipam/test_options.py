"""nv-ipam's definitions: which pools, and what a pod asks for."""

from pathlib import Path

import pytest

from cni.spec.errors import CNIError, Code
from ipam.nv_ipam.options import NodeDefaults, NvIpamOptions, node_defaults, read
from tests.unit.ipam.calls import Json, request

PLAIN = NodeDefaults()


def options(
    ipam: Json | None = None,
    defaults: NodeDefaults = PLAIN,
    cni_args: str = "",
    **config: object,
) -> NvIpamOptions:
    keys = {"type": "nv-ipam"} | dict(ipam or {})
    asked = request("ADD", keys, "c1", network="net", args=cni_args, config=config)
    return read(asked.config, asked.arguments, defaults)


@pytest.mark.parametrize(
    ("ipam", "defaults", "pools"),
    [
        ({}, PLAIN, ["ippool/net"]),
        ({"poolName": "a"}, PLAIN, ["ippool/a"]),
        ({"poolName": "a,b"}, PLAIN, ["ippool/a", "ippool/b"]),
        ({"poolName": " a , b,c"}, PLAIN, ["ippool/a", "ippool/b", "ippool/c"]),
        ({"poolName": "a", "poolType": "CIDRPool"}, PLAIN, ["cidrpool/a"]),
        ({"poolName": "a, cidrpool/b"}, PLAIN, ["ippool/a", "cidrpool/b"]),
        ({}, NodeDefaults(poolName="d", poolType="cidrpool"), ["cidrpool/d"]),
        ({"poolName": "a"}, NodeDefaults(poolName="d", forcePoolName=True), ["ippool/a"]),
        ({"forcePoolName": False}, NodeDefaults(forcePoolName=True), ["ippool/net"]),
        ({"poolName": None, "logFile": "/x", "whatever": [1]}, PLAIN, ["ippool/net"]),
    ],
)
def test_pools_are_named_by_the_definition_the_node_or_the_network(
    ipam: Json, defaults: NodeDefaults, pools: list[str]
) -> None:
    assert list(options(ipam, defaults).pools) == pools


def test_the_pods_own_pools_go_first() -> None:
    cni = {"poolNames": ["x", "y"], "poolType": "cidrpool"}
    found = options({"poolName": "a"}, args={"cni": cni})
    assert found.pools == ("cidrpool/x", "cidrpool/y")


def test_empty_args_are_no_error() -> None:
    asked = request("ADD", {"type": "nv-ipam"}, "c1", network="net", config={"args": {}})
    assert read(asked.config, asked.arguments, NodeDefaults()).pools == ("ippool/net",)


@pytest.mark.parametrize(
    ("ipam", "said"),
    [
        ({"forcePoolName": True}, '"forcePoolName" is set: name the pool'),
        ({"poolName": "a,,b"}, "cannot be the name of a pool"),
        ({"poolName": "a/b"}, "cannot be the name of a pool"),
        ({"poolName": "a,a"}, "names a pool twice"),
        ({"poolType": "pool"}, "the kinds of pools are ippool and cidrpool"),
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
    return [where for where, _ in options({}, PLAIN, cni_args, **config).requested]


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


def test_the_nodes_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "nv-ipam.conf"
    assert node_defaults(path) == NodeDefaults()
    path.write_text('{"poolName": null, "forcePoolName": true, "logLevel": "info"}')
    assert node_defaults(path) == NodeDefaults(forcePoolName=True)
    path.unlink()
    path.write_text('{"poolName": "other pool"}')
    assert node_defaults(path) == NodeDefaults(poolName="other pool")
    path.unlink()
    path.write_text("{")
    with pytest.raises(CNIError, match="mend or remove it") as caught:
        node_defaults(path)
    assert caught.value.code == Code.DECODING_FAILURE
