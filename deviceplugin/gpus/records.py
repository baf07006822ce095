"""The kubelet's records of ids of a resource, compared with the ledger."""

from collections.abc import Iterable

from base.types import DeviceId
from deviceplugin.kubelet.records import PodDevices
from deviceplugin.ledger import Ledger


def adopted(ledger: Ledger, resource: str, rows: Iterable[PodDevices]) -> list[DeviceId]:
    """The ids of a resource that the kubelet gave to containers and the ledger lacks, sorted."""
    known = ledger.keys()
    ids = {device_id for row in rows if row.resource == resource for device_id in row.ids}
    return sorted(device_id for device_id in ids if (resource, device_id) not in known)
