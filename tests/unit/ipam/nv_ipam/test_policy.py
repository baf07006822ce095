"""Rules for nv-ipam's pools: their names, and the addresses that a pod gets of them."""

from pathlib import Path
from typing import Any

import pytest

from base.pod import Pod
from ipam.address_policy import of_configuration
from ipam.plugin import AddressPlugin
from ipam.store_choice import Stores, declared
from policy.allowance import Allowance, NotAllowed, of_pod
from policy.document import rules_of
from policy.rules import Policy
from tests.unit.ipam.calls import error_of, request
from tests.unit.ipam.nv_ipam.nodes import NvNode, World, put_ippool

USE = {"ipamTypes": ["nv-ipam"], "networkNames": ["ippool/po*"]}


def stores(node: NvNode) -> Stores:
    """The stores of a node whose lessee leases at once."""
    return Stores(node.files, lambda: "cluster", node.lessee, clock=node.clock, patience=0.0)


def policy(**use: Any) -> Policy:  # noqa: ANN401
    rule = {"name": "r", "subjects": [{"namespaces": ["ns"]}], "use": USE | use}
    return Policy(rules=rules_of([rule], "rules"))


def asked(tmp_path: Path, allowed: Allowance, **how: Any) -> Allowance:  # noqa: ANN401
    call = request("ADD", {"type": "nv-ipam", "poolName": "pool"}, "c1", pod="p", **how)
    return of_configuration(allowed, *declared(call))


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
    world = World(memory_path)
    put_ippool(world.server, {}, per_node_block_size=8)
    node = world.node("a")
    world.settle()

    def plugin(rules: Policy) -> AddressPlugin:
        return AddressPlugin(stores(node), lambda: node.boot, lambda: rules)

    call = request("ADD", {"type": "nv-ipam", "poolName": "pool"}, "p-1", pod="p")
    error = error_of(lambda: plugin(policy(ranges=["10.1.0.0/16"])).reserve(call))
    assert isinstance(error, NotAllowed) and '"use.ranges"' in error.message
    assert node.held() == set()
    plugin(policy(ranges=["10.0.0.0/24"])).reserve(call)
    assert len(node.held()) == 1


LIMITS = [
    {"name": "narrow", "use": USE | {"ranges": ["10.0.0.0/24"], "addressesPerPod": 1}},
    {"name": "wide", "use": USE | {"ranges": ["10.7.0.0/24"], "addressesPerPod": 3}},
    {"name": "both", "use": USE | {"ranges": ["10.0.0.0/24", "10.7.0.0/24"], "addressesPerPod": 2}},
]
"""Rules with a range and a limit each."""


def limits(*names: str) -> Policy:
    found = [
        each | {"subjects": [{"namespaces": ["ns"]}]} for each in LIMITS if each["name"] in names
    ]
    return Policy(rules=rules_of(found, "rules"))


@pytest.mark.parametrize(
    ("names", "pool", "most", "left"),
    [
        (("narrow", "wide"), "pool", 1, "narrow"),
        (("narrow", "wide"), "pool2", 3, "wide"),
        (("narrow", "wide", "both"), "pool", 2, "narrow, both"),
        (("narrow", "wide", "both"), "pool,pool2", 2, "both"),
    ],
)
def test_the_limit_is_that_of_the_rules_that_have_the_pools_addresses(
    memory_path: Path, names: tuple[str, ...], pool: str, most: int, left: str
) -> None:
    """Also where a rule for another range has a larger one."""
    world = World(memory_path)
    put_ippool(world.server, {}, per_node_block_size=8)
    put_ippool(world.server, {}, "10.7.0.0/24", "pool2", per_node_block_size=8)
    node = world.node("a")
    world.settle()
    rules = limits(*names)
    plugin = AddressPlugin(stores(node), lambda: node.boot, lambda: rules)

    def add(number: int) -> None:
        keys = {"type": "nv-ipam", "poolName": pool}
        plugin.reserve(request("ADD", keys, "p-1", pod="p", ifname=f"net{number}"))

    of_one = len(pool.split(","))
    for number in range(most // of_one):
        add(number)
    error = error_of(lambda: add(most))
    assert isinstance(error, NotAllowed), error
    assert error.key == "addressesPerPod"
    assert f"the rules ({left}) allow {most}" in error.message
    assert len(node.held()) == most
