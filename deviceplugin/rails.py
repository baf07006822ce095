"""Orders the HCAs of a container by rail, so that the order is the same on each node.

Entry n of `rails` in config.yaml selects the HCAs of rail n. HCAs without a rail come last. HCAs of
one rail, and HCAs without a rail, are ordered by PCI address, then by the number of an SF, then by
their lowest GUID, then by name.
"""

import re
from collections.abc import Sequence

from msgspec.structs import replace

from deviceplugin.checkpoint import AllocatedHCA
from host.sysfs import selectors
from host.sysfs.discovery import HCA
from host.sysfs.selectors import Selector

Place = tuple[bool, int, tuple[int, ...], str, str]


def number(rails: Sequence[Selector], hca: HCA) -> int | None:
    """The rail of the HCA, or `None`. A selector that matches a PF also matches the PF's VFs."""
    tried = [hca]
    if hca.pf:
        names = {"netdevs": hca.pf_netdevs, "rdma_names": hca.pf_rdma_names}
        tried.append(replace(hca, address=hca.pf, pf="", index=None, aux_type="", **names))
    for rail, selector in enumerate(rails):
        if any(selectors.match((selector,), each) is not None for each in tried):
            return rail
    return None


def place(hca: HCA | AllocatedHCA, rail: int | None) -> Place:
    """The sort key of an HCA."""
    guids = [port.guid for rdma in hca.rdma for port in rdma.ports if port.guid]
    return rail is None, rail or 0, _numbers(hca.address), min(guids, default="~"), hca.id


def _numbers(address: str) -> tuple[int, ...]:
    """ "0000:3b:00.1" is (0, 0, 0x3b, 0, 1), "mlx5_core.sf.4" is (1, 4), "" is (2,)."""
    if ":" in address:
        return (0, *(int(part, 16) for part in re.split("[:.]", address)))
    return (1, int(address.rpartition(".")[2])) if address else (2,)
