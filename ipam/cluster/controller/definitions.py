"""Which pools the NetworkAttachmentDefinitions of a cluster ask for."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from cni.spec import config
from cni.spec.config import NetworkConfig
from cni.spec.errors import CNIError
from ipam import options
from ipam.cluster.api import NetworkDefinition
from ipam.cluster.names import pool_name
from ipam.cluster.objects import PoolSpec


class UnusableDefinition(msgspec.Struct, frozen=True):
    """A definition that gets no pool, and why: the error that its pods get, too."""

    definition: NetworkDefinition
    why: str


class DemandedPool(msgspec.Struct, frozen=True):
    """A pool, and one of the definitions that ask for it."""

    spec: PoolSpec
    definition: NetworkDefinition


class ReadDefinition(msgspec.Struct, frozen=True):
    """What is kept of a definition: its name, the pools that it asks for, and its mistake if it has
    one. Its configuration is not: tenants choose how large that is."""

    definition: NetworkDefinition
    pools: Mapping[str, PoolSpec] = {}
    why: str = ""


class Demand(msgspec.Struct, frozen=True):
    """What all definitions ask for: the pools by name, and the definitions with a mistake."""

    pools: Mapping[str, DemandedPool] = {}
    unusable: tuple[UnusableDefinition, ...] = ()


def read(definitions: Iterable[NetworkDefinition]) -> Iterator[ReadDefinition]:
    """The definitions that ask for pools, or that have a mistake, one by one."""
    for written in definitions:
        definition = replace(written, config="")
        try:
            if pools := _pools(written):
                yield ReadDefinition(definition, pools)
        except CNIError as error:
            yield ReadDefinition(definition, why=str(error))


def demand(definitions: Iterable[ReadDefinition]) -> Demand:
    """The pools that the definitions ask for. Their excludes are theirs alone: no pool has them."""
    pools: dict[str, DemandedPool] = {}
    unusable = []
    for each in definitions:
        if each.why:
            unusable.append(UnusableDefinition(each.definition, each.why))
        for name, spec in each.pools.items():
            asked = pools.setdefault(name, DemandedPool(spec, each.definition))
            if asked.spec != spec:
                mistake = not_of(name, asked.spec, spec)
                unusable.append(UnusableDefinition(each.definition, mistake))
    return Demand(pools, tuple(unusable))


def not_of(name: str, there: PoolSpec, asked: PoolSpec) -> str:
    """Why a pool is of no use for a definition that asks for another one with its name.

    "fd00:1::/64" alone and "1::/64" of the network name "fd00" both have "fd00-1--0-64".
    """
    return (
        f"AddressPool {name} is of {there.range}, and not of {asked.range}: use another "
        '"network_name"'
    )


def _pools(definition: NetworkDefinition) -> dict[str, PoolSpec]:
    pools = {}
    for ipam in _cluster_wide(definition.config):
        read = options.read(NetworkConfig(keys={"ipam": ipam}))
        for range_set in read.sets:
            for range_ in range_set.ranges:
                cidr = str(range_.network)
                spec = PoolSpec(range=cidr, network_name=read.network_name, shared=read.shared)
                pools[pool_name(spec.network_name, cidr, shared=spec.shared)] = spec
    return pools


def _cluster_wide(written: str) -> Iterator[dict[str, Any]]:
    """The `ipam` objects of a configuration or chain that are ours, and not of one node."""
    try:
        keys = config.decode(written.encode(errors="replace")).keys
    except CNIError:
        return  # Multus refuses it too; it is empty where a file of the node has the configuration
    plugins = keys.get("plugins")
    for plugin in plugins if isinstance(plugins, list) else [keys]:
        ipam = plugin.get("ipam") if isinstance(plugin, dict) else None
        if not isinstance(ipam, dict) or ipam.get("type") not in options.TYPES:
            continue
        if ipam.get("scope") != "node":
            # Where an address comes from does not change which addresses there are.
            yield {key: value for key, value in ipam.items() if key != "scope"}
