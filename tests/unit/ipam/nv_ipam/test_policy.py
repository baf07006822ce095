"""Rules for nv-ipam's pools: their names, and the addresses that a pod gets of them."""

from pathlib import Path
from typing import Any

import pytest

from base.pod import Pod
from cni.policy.allowance import Allowance, NotAllowed, of_pod
from cni.policy.document import rules_of
from cni.policy.rules import Policy
from ipam.nv_ipam.plugin import NvIpam
from ipam.plugin import AddressPlugin
from ipam.scope import Stores
from tests.fake_api import FakeApi
from tests.unit.ipam.calls import error_of, request
from tests.unit.ipam.cluster.nv_ipam.nodes import FollowingNode, put_ippool

ENTRY = {"a": ("10.0.0.1", "10.0.0.10")}
USE = {"ipamTypes": ["nv-ipam"], "networkNames": ["ippool/po*"]}


def policy(**use: Any) -> Policy:  # noqa: ANN401
    rule = {"name": "r", "subjects": [{"namespaces": ["ns"]}], "use": USE | use}
    return Policy(rules=rules_of([rule], "rules"))


def asked(tmp_path: Path, allowed: Allowance, **how: Any) -> Allowance:  # noqa: ANN401
    call = request("ADD", {"type": "nv-ipam", "poolName": "pool"}, "c1", pod="p", **how)
    return NvIpam(tmp_path, tmp_path / "nv-ipam.conf").permitted(call, allowed)


def test_pools_and_addresses_of_nv_ipam_need_a_rule(tmp_path: Path) -> None:
    allowed = of_pod(policy(ranges=["10.0.0.0/24"]), Pod("ns", "p"))
    assert asked(tmp_path, allowed).left
    for config, key in (
        ({"args": {"cni": {"poolNames": ["other"]}}}, "ipam.poolName"),
        ({"args": {"cni": {"ips": ["10.9.0.1"]}}}, "args.cni.ips"),
        ({"runtimeConfig": {"ips": ["10.9.0.1"]}}, "runtimeConfig.ips"),
    ):
        with pytest.raises(NotAllowed) as refused:
            asked(tmp_path, allowed, config=config)
        assert refused.value.key == key


def test_a_pool_outside_of_the_ranges_gives_no_address(memory_path: Path) -> None:
    server = FakeApi()
    node = FollowingNode(server, memory_path, "a")
    put_ippool(server, ENTRY)
    node.step()

    def plugin(rules: Policy) -> AddressPlugin:
        stores = Stores(node.files)
        return AddressPlugin(stores, lambda: node.boot, lambda: rules, lambda: node.nv_ipam)

    call = request("ADD", {"type": "nv-ipam", "poolName": "pool"}, "p-1", pod="p")
    error = error_of(lambda: plugin(policy(ranges=["10.1.0.0/16"])).add(call))
    assert isinstance(error, NotAllowed) and '"use.ranges"' in error.message
    assert node.held() == set()
    plugin(policy(ranges=["10.0.0.0/24"])).add(call)
    assert len(node.held()) == 1
