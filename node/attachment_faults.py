"""Finds attachments with a lost P_Key, or with an MTU that is larger than their parent's.

A P_Key counts only while its ports are ACTIVE: a subnet manager fills the table before.

MTUs count only for mlx5. Its IPoIB children receive into the buffers of their parent
(mlx5i_pkey_init_rx), and the MTU of a PF is the MTU of the physical port (mlx5e_set_mtu).
"""

import time
from contextlib import suppress

import msgspec

from base.paths import Paths
from cni.attachments.journal import Journal, JournalDamaged, JournalEntry, Phase
from cni.ipoib.options import DATAGRAM
from deviceplugin.health import FaultStates
from host.errors import HostError
from host.namespaces import NetworkNamespace
from host.sysfs import attribute_files, infiniband
from host.sysfs.discovery import HCA
from node import pods
from node.state import ThisNode


class _RecordedInterface(msgspec.Struct):
    mtu: int = 0


class _RecordedLink(msgspec.Struct):
    """Fields of the records of ipoib (ChildRecord) and sriov (DeviceRecord)."""

    parent: str = ""
    pkey: int | None = None
    mode: str = ""
    mtu: int = 0
    infiniband: bool = False
    origin: _RecordedInterface | None = None  # the interface before the ADD


class AttachmentHealth(FaultStates):
    """The faults of attachments, by the attachment's key."""

    def __init__(self) -> None:
        super().__init__()
        # The last look's P_Keys by RDMA device, port and P_Key, and its MTUs by interface.
        self._pkeys: dict[tuple[str, int, int], bool | None] = {}
        self._mtus: dict[str, int | None] = {}

    def look(self, node: ThisNode) -> list[tuple[str, str]]:
        """Read the journal and sysfs. Returns the HCA's id and the text of each reported fault."""
        self._pkeys, self._mtus = {}, {}
        hcas: dict[str, str] = {}
        faults: dict[str, str | None] = {}
        for entry in Journal(node.paths).entries():
            if isinstance(entry, JournalDamaged) or entry.phase is not Phase.ATTACHED:
                continue
            hca = node.hca(pods.origin_of(node, entry).hca)
            with suppress(JournalDamaged):
                recorded = entry.undo_as(_RecordedLink)
                if hca is not None:
                    key = entry.attachment.key
                    hcas[key] = hca.id
                    faults[key] = self._fault(node.paths, entry, hca, recorded)
        self._observe(faults, time.monotonic())
        return [(hcas[key], text) for key, text in self.reports().items() if text]

    def differs(self, paths: Paths) -> bool:
        """Whether a P_Key or an MTU differs from the last look. Reads only the files in use."""
        return any(
            infiniband.has_pkey(paths, *slot) != before for slot, before in self._pkeys.items()
        ) or any(_mtu(paths, netdev) != before for netdev, before in self._mtus.items())

    def _fault(
        self, paths: Paths, entry: JournalEntry, hca: HCA, recorded: _RecordedLink
    ) -> str | None:
        of = f"of {entry.ifname} of {entry.pod_namespace}/{entry.pod_name}"
        texts = []
        if lost := self._lost_pkey(paths, hca, recorded):
            texts.append(f"{lost} {of}")
        above = _above(hca, recorded)
        if above and above not in self._mtus:
            self._mtus[above] = _mtu(paths, above)
        most = self._mtus.get(above)
        given = recorded.mtu or (recorded.origin.mtu if recorded.origin is not None else 0)
        # The kernel or the pod may have lowered the MTU since the ADD.
        if most and given > most and (now := _mtu_in_pod(entry)) > most:
            texts.append(
                f"{above} has MTU {most}, less than the MTU {now} {of}: larger packets are lost"
            )
        return "; ".join(texts) or None

    def _lost_pkey(self, paths: Paths, hca: HCA, recorded: _RecordedLink) -> str:
        """The loss of the attachment's P_Key; "" if no loss is certain."""
        every = [(rdma.name, port) for rdma in hca.rdma for port in rdma.ports]
        ports = [on for on in every if recorded.parent in on[1].netdevs] or every
        states = {(port.link_layer, port.state) for _, port in ports}
        if recorded.pkey is None or states != {("InfiniBand", "ACTIVE")}:
            return ""
        slots = [(rdma, port.number, recorded.pkey) for rdma, port in ports]
        for slot in slots:
            if slot not in self._pkeys:
                self._pkeys[slot] = infiniband.has_pkey(paths, *slot)
        if any(self._pkeys[slot] is not False for slot in slots):
            return ""
        names = ", ".join(f"{rdma}/{number}" for rdma, number, _ in slots)
        return f"the P_Key table of {names} no longer has P_Key {recorded.pkey:#06x}"


def _above(hca: HCA, recorded: _RecordedLink) -> str:
    """The interface whose MTU limits the attachment's; "" if that is not certain."""
    if not hca.driver.startswith("mlx5_core"):
        return ""
    if recorded.parent:
        return recorded.parent if recorded.mode == DATAGRAM else ""
    return "" if recorded.infiniband or len(hca.pf_netdevs) != 1 else hca.pf_netdevs[0]


def _mtu(paths: Paths, netdev: str) -> int | None:
    return attribute_files.number(f"{paths.sysfs}/class/net/{netdev}/mtu")


def _mtu_in_pod(entry: JournalEntry) -> int:
    """The interface's present MTU, read in the pod's namespace; 0 if unknown."""
    from host.netlink import links  # the controller and most commands do without pyroute2
    from host.netlink.sockets import netlink

    with (
        suppress(HostError, OSError),
        NetworkNamespace.open(entry.netns) as namespace,
        netlink(namespace) as route,
    ):
        link = links.find(route, entry.ifname)
        if link is not None and namespace.identity == entry.netns_identity:
            return link.mtu
    return 0
