"""The controller with the objects of 5,000 nodes: one round's time, and the process' memory.

`python -m bench.controller [NODES] [BLOCKS]`. The objects are decoded from JSON, as a client
decodes them. The API server is one that keeps nothing: what is measured is the controller.
"""

import resource
import sys
import time
import uuid
from typing import Any

import msgspec

from ipam.addresses import parse_interface
from ipam.cluster.api import ClusterApi, Node
from ipam.cluster.controller.rounds import Rounds, World
from ipam.cluster.geometry import Geometry
from ipam.cluster.objects import (
    AddressBlock,
    AddressPool,
    BlockSpec,
    BlockStatus,
    Holder,
    Meta,
    PoolSpec,
)
from tests.fake_api import FakeApi

RANGE = "10.0.0.0/12"
SIZE = 32


def _node(number: int) -> Node:
    return Node(
        name=f"node-{number}",
        uid=str(uuid.uuid4()),
        machine_id=uuid.uuid4().hex,
        system_uuid=str(uuid.uuid4()),
        boot_id=str(uuid.uuid4()),
        ready=True,
    )


def _block(geometry: Geometry, index: int, node: Node, instance: str) -> AddressBlock:
    holder = Holder(
        instance=instance,
        node=node.name,
        node_uid=node.uid,
        machine_id=node.machine_id,
        system_uuid=node.system_uuid,
        boot=node.boot_id,
    )
    spec = BlockSpec(
        pool="10.0.0.0-12",
        range=geometry.written(index),
        holder=holder,
        nonce=str(uuid.uuid4()),
    )
    pods = {str(offset): f"team-a/trainer-{index}-{offset} net1" for offset in range(24)}
    return AddressBlock(
        metadata=Meta(
            name=geometry.name("default", index), uid=str(uuid.uuid4()), resource_version=str(index)
        ),
        spec=spec,
        status=BlockStatus(used=24, free=8, seq=index, holders=pods),
    )


def _written(nodes: int, blocks: int) -> tuple[bytes, bytes]:
    """Blocks and nodes as JSON."""
    geometry = Geometry(parse_interface(RANGE)[1], SIZE)
    machines = [_node(number) for number in range(nodes)]
    instances = [str(uuid.uuid4()) for _ in machines]
    leased = [
        _block(geometry, index, machines[index % nodes], instances[index % nodes])
        for index in range(blocks)
    ]
    return msgspec.json.encode(leased), msgspec.json.encode(machines)


def _rss() -> float:
    """MiB that the process has now."""
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * resource.getpagesize() / (1 << 20)


def _timed(what: str, began: float) -> None:
    print(f"{what:32} {time.process_time() - began:8.2f} s of CPU   {_rss():7.0f} MiB")


def measure(nodes: int, blocks: int) -> None:
    """Print each step's time, and the memory after it."""
    written = _written(nodes, blocks)
    print(f"{nodes} nodes, {blocks} blocks ({len(written[0]) / 1e6:.0f} MB of JSON)")
    _timed("before", time.process_time())
    began = time.process_time()
    leased = msgspec.json.decode(written[0], type=tuple[AddressBlock, ...])
    machines = msgspec.json.decode(written[1], type=tuple[Node, ...])
    _timed("objects are decoded", began)
    api = FakeApi()
    spec = PoolSpec(range=RANGE, block_size=SIZE)
    api.create(AddressPool(metadata=Meta(name="10.0.0.0-12"), spec=spec))
    rounds = Rounds(_Quiet(api, leased))
    for number in range(1, 4):
        began = time.process_time()
        world = World(
            read_at=time.monotonic(),
            read_until=time.monotonic(),
            nodes=machines,
            definitions=(),
            pools=api.list(AddressPool).items,
            blocks=leased,
        )
        seen = rounds.round(world)
        _timed(f"round {number}", began)
    (pool,) = seen.pools
    assert pool.status.blocks.leased == blocks, pool.status
    assert seen.standings == {"well": blocks}


class _Quiet:
    """The API server with these blocks, whoever holds them."""

    def __init__(self, api: ClusterApi, blocks: tuple[AddressBlock, ...]) -> None:
        self._api = api
        self._blocks = blocks

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._api, name)

    def list(self, kind: type[Any], *how: Any, **more: Any) -> Any:  # noqa: ANN401
        from ipam.cluster.api import Listing

        blocks = Listing(self._blocks, "1")
        return blocks if kind is AddressBlock else self._api.list(kind, *how, **more)


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    measure(*(numbers or [5_000, 25_000]))
