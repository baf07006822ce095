"""Pools of nv-ipam that overlap: what a round tells of them, before a pod gets no address."""

from types import SimpleNamespace
from typing import cast

from msgspec.structs import replace

from ipam.cluster.controller.exposition import ControllerExposition
from ipam.cluster.controller.process import ControllerProcess
from ipam.cluster.controller.reclaim import ReclaimCounts
from ipam.cluster.nv_ipam.objects import NvIPPool
from ipam.cluster.objects import AddressPool
from tests.fake_api import FakeApi
from tests.unit.ipam.cluster.nodes import Clock
from tests.unit.ipam.cluster.nv_ipam.nodes import NAMESPACE, put_cidrpool, put_ippool
from tests.unit.ipam.cluster.nv_ipam.own import Controller


def overlapping(server: FakeApi) -> None:
    """Two IPPools, and a CIDRPool that is older than one of them: within a second the key tells."""
    put_ippool(server, {}, "10.0.0.0/24", "one", per_node_block_size=16)
    put_ippool(server, {}, "10.0.0.0/25", "two", per_node_block_size=16)
    put_cidrpool(server, {}, "10.0.0.240/28", "routed", per_node_network_prefix=29)


def conditions(server: FakeApi) -> dict[str, str]:
    """The messages of the conditions Overlap, by the network of the AddressPool."""
    return {
        pool.spec.network_name: each.message
        for pool in server.look_at_all(AddressPool).items
        for each in pool.status.conditions
        if (each.type, each.status) == ("Overlap", "True")
    }


def test_each_address_pool_of_an_ippool_says_which_others_have_its_addresses() -> None:
    server, clock = FakeApi(), Clock()
    overlapping(server)
    controller = Controller(server, clock)
    controller.round()
    seen = controller.round()
    found = conditions(server)
    assert "also of cidrpool/routed, which is older" in found["nv-ipam/ippool/one"]
    assert "128 of its addresses are also of ippool/two" in found["nv-ipam/ippool/one"]
    assert "also of ippool/one, which is older" in found["nv-ipam/ippool/two"]
    assert [tuple(each) for each in seen.overlaps] == [
        ("ippool/one", "cidrpool/routed", 16),
        ("ippool/two", "ippool/one", 128),
    ]
    told = [event.regarding["name"] for event in server.events]
    assert sorted(told) == ["one", "two"]  # once, though it was looked at twice


def test_the_condition_goes_with_the_overlap() -> None:
    server, clock = FakeApi(), Clock()
    overlapping(server)
    controller = Controller(server, clock)
    controller.round()
    pools = server.look_at_all(NvIPPool, namespace=NAMESPACE).items
    for pool in pools:
        notes = {"ipam.podfabric.io/private": "true"}
        server.put(replace(pool, metadata=replace(pool.metadata, annotations=notes)))
    clock.now += 60.0
    assert not controller.round().overlaps
    assert not conditions(server)


def test_the_metric_names_both_pools() -> None:
    server, clock = FakeApi(), Clock()
    overlapping(server)
    controller = Controller(server, clock)
    controller.round()
    process = SimpleNamespace(
        leadership=SimpleNamespace(holds=True),
        rounds=1,
        counts=ReclaimCounts(),
        errors={},
        polled=None,
        unreadable=lambda: (),
        now=clock,
        seen=controller.round(),
    )
    text = ControllerExposition(cast(ControllerProcess, process)).text().decode()
    assert 'podfabric_cluster_nv_ipam_overlap{older="ippool/one",pool="ippool/two"} 128.0' in text
    name = next(each.metadata.name for each in server.look_at_all(AddressPool).items)
    assert f'podfabric_cluster_pool_condition{{pool="{name}",type="Overlap"}} 1.0' in text
