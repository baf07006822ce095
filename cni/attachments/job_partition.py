"""Writes the P_Key of a pod's interfaces into the NCCL and UCX files of the pod's containers."""

from collections.abc import Iterator

import msgspec

from base.locks import locked
from base.paths import Paths
from cni.attachments.journal import Journal, JournalDamaged, JournalEntry
from cni.attachments.pod_choices import lock_of
from cni.spec.notes import note
from deviceplugin.allocate import job_config
from deviceplugin.allocate.job_config import PartitionKey
from deviceplugin.pod_devices import PodHoldings
from host.sysfs import infiniband
from host.sysfs.infiniband import FULL_MEMBER


class _RecordedPKey(msgspec.Struct):
    pkey: int | None = None


def write(paths: Paths, journal: Journal, holdings: PodHoldings, container_id: str) -> None:
    """Write the one P_Key of the container's interfaces. Raises OSError, Busy.

    The journal already has the entries of the interfaces. NCCL and UCX use one P_Key for all HCAs,
    so interfaces in several partitions leave no P_Key in the files.
    """
    if not holdings.keys:
        return
    with locked(lock_of(paths, holdings.pod), f"pod {holdings.pod}"):
        partitions = set(_partitions(journal, container_id))
        if not partitions:
            return
        pkey = None
        if len(partitions) == 1:
            pkey = _in_tables(paths, holdings, partitions.pop())
        else:
            several = ", ".join(f"{partition:#06x}" for partition in sorted(partitions))
            note(
                f"pod {holdings.pod} has interfaces in several partitions ({several}): set the "
                "P_Key of NCCL and UCX in the pod"
            )
        job_config.set_pkey(paths, holdings.keys, pkey)


def _partitions(journal: Journal, container_id: str) -> Iterator[int]:
    """The P_Keys of the container's interfaces, without the bit of membership."""
    for entry in journal.entries(container_id):
        if isinstance(entry, JournalEntry) and entry.container_id == container_id:
            try:
                pkey = entry.undo_as(_RecordedPKey).pkey
            except JournalDamaged:
                continue
            if pkey is not None:
                yield pkey & ~FULL_MEMBER


def _in_tables(paths: Paths, holdings: PodHoldings, partition: int) -> PartitionKey:
    """The P_Key, with the membership and the index in the tables of the pod's ports."""
    slots = [
        slot
        for hca in holdings.hcas
        for rdma in hca.device.rdma
        for port in rdma.ports
        if (slot := infiniband.pkey_slot(paths, rdma.name, port.number, partition)) is not None
    ]
    indexes, values = ({slot[part] for slot in slots} for part in (0, 1))
    return PartitionKey(
        value=values.pop() if len(values) == 1 else partition | FULL_MEMBER,
        index=indexes.pop() if len(indexes) == 1 else None,
    )
