"""Many attachments at once: partitions are kept apart, and nothing is left."""

from contextlib import ExitStack
from functools import partial
from itertools import pairwise, product
from typing import Any

from cni.attachments.journal import Journal
from cni.spec.attachment import Attachment
from tests.kernel.pods import AT_ONCE, NETWORK, Node, ipam, link_names, pings, pod
from tests.kernel.processes import in_processes

PARENTS = ("ib0", "ib1")
PKEYS = ("0x8001", "0x8002", "0x8003")


def _config(parent: str, pkey: str) -> dict[str, Any]:
    # The same range for all: only the partition separates them.
    return {"master": parent, "pkey": pkey, "ipam": ipam("10.1.0.0/24"), "wait_carrier": 30}


def test_twenty_attachments_at_once_on_two_parents_and_three_partitions(node: Node) -> None:
    kinds = list(product(PARENTS, PKEYS))
    before = link_names()
    with ExitStack() as stack:
        names = [stack.enter_context(pod(f"load{number}")) for number in range(20)]
        placed = {name: kinds[number % len(kinds)] for number, name in enumerate(names)}
        adds = [partial(node.attach, name, **_config(*placed[name])) for name in names]
        assert in_processes(adds, 1.5 * AT_ONCE) == [0] * 20
        assert len(set(node.reservations())) == 20

        address = {name: _address(node, name) for name in names}
        for pkey in PKEYS:
            inside = [name for name in names if placed[name][1] == pkey]
            assert {placed[name][0] for name in inside} == set(PARENTS)
            source, *targets = inside
            for target in targets:
                assert pings(source, address[target]), (source, target, pkey)
        for source, target in pairwise(names[:7]):
            assert placed[source][1] != placed[target][1]
            assert not pings(source, address[target], tries=1), (source, target)

        deletes = [partial(node.detach, name, **_config(*placed[name])) for name in names]
        assert in_processes(deletes, 1.5 * AT_ONCE) == [0] * 20
        for name in names:
            assert link_names(name) == {"lo"}
    assert node.leftovers() == []
    assert link_names() == before


def _address(node: Node, container_id: str) -> str:
    entry = Journal(node.paths).read(Attachment(NETWORK, container_id, "net1"))
    assert entry is not None
    return entry.addresses[0].partition("/")[0]
