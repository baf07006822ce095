"""On InfiniBand: a pod does not get an address that a lost machine still has."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from base.loop import boottime
from base.paths import Paths
from cni.ipoib.plugin import IPoIB
from cni.spec.errors import CNIError, Code
from cni.spec.plugin import Plugin
from ipam.addresses import parse_interval
from ipam.leases.claim_request import Want
from ipam.plugin import AddressPlugin
from ipam.store.block_rows import LeasedBlock
from ipam.store.reservations import Owner
from ipam.store.store_files import StoreFiles
from ipam.store_choice import Stores
from tests.kernel.pods import IP, Node, link_in, run

RANGES = {"10.57.0.0/29": ("10.57.0.1", "10.57.0.2"), "fd00:57::/125": ("fd00:57::1", "fd00:57::2")}


class NoMoreBlocks:
    """The lessee of a node that leases no further block than those in its store."""

    def claim(self, wants: Sequence[Want], deadline: float) -> None:
        raise CNIError(Code.TRY_AGAIN, f"nothing more is leased: {wants}, {deadline}")

    def low(self, wants: Sequence[Want]) -> None:
        pass

    def failed(self, owner: Owner, error: CNIError) -> None:
        pass

    def unable(self, wants: Sequence[Want]) -> str:
        return "nothing more is leased"


class LeasingNode(Node):
    """A node that leases the only block of each range and must probe all of its addresses."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.files = StoreFiles(self.paths.ipam, kept=False)
        with self.files.transaction() as tables, tables.change():
            for number, range_ in enumerate(RANGES):
                tables.put_block(_block(self.paths, number, range_))

    def plugin(self) -> Plugin:
        stores = Stores(self.files, lambda: "cluster", NoMoreBlocks())
        plugin = AddressPlugin(stores, self.paths.boot_id)
        return IPoIB(self.paths, plugin, policy=lambda: self.policy)

    def unprobed(self, number: int) -> list[str]:
        """The first addresses of the runs of a block that still need a probe."""
        with self.files.transaction() as tables:
            block = tables.block(f"block-{number}")
        assert block is not None
        return [str(run.first - block.first) for run in block.unprobed]


def _block(paths: Paths, number: int, range_: str) -> LeasedBlock:
    covered = parse_interval(range_)
    return LeasedBlock(
        name=f"block-{number}",
        uid="u",
        space="default",
        pool="p",
        domains=("",),
        first=covered.first,
        last=covered.last,
        max_offline=1800.0,
        boot=paths.boot_id(),
        confirmed=boottime(),
        unprobed=(covered,),
    )


@pytest.mark.parametrize("range_", RANGES)
def test_the_pod_of_the_lost_machine_is_found_over_infiniband(
    node: Node, tmp_path: Path, pods: list[str], range_: str
) -> None:
    node.add("lost", pods[0], master="ib0")
    lost = link_in(pods[0])
    assert lost is not None
    first, second = RANGES[range_]
    prefix = range_.partition("/")[2]
    run(IP, "-n", pods[0], "address", "add", f"{first}/{prefix}", "dev", "net1", "nodad")
    leasing = LeasingNode(tmp_path / "leasing")
    ipam = {"type": "podfabric-ipam", "range": range_}
    try:
        refused = leasing.refused("c1", pods[1], master="ib1", ipam=ipam)
        assert refused.document["code"] == Code.TRY_AGAIN
        assert f"{first} ({lost.mac})" in refused.text
        reply = leasing.add("c2", pods[1], master="ib1", ipam=ipam)
        assert reply.addresses == [second]
        assert second in run(IP, "-n", pods[1], "address", "show", "dev", "net1")
    finally:
        leasing.delete("c2", pods[1], master="ib1", ipam=ipam)
        node.delete("lost", pods[0], master="ib0")
    number = list(RANGES).index(range_)
    assert leasing.unprobed(number) == ["0", "3"]
    again = leasing.add("c3", pods[1], master="ib1", ipam=ipam)
    assert again.addresses == [second]
    leasing.delete("c3", pods[1], master="ib1", ipam=ipam)
