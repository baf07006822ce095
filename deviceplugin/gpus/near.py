"""Which HCAs a container has, and how far each GPU is from them."""

import logging
from collections.abc import Collection, Iterable, Sequence

from base.paths import Paths
from deviceplugin.allocate.demand import waiting
from deviceplugin.allocate.preferred import COSTS
from deviceplugin.kubelet import records
from deviceplugin.kubelet.pod_resources import PodResourcesClient
from deviceplugin.kubelet.records import KubeletUnreadable, PodDevices
from deviceplugin.ledger import Ledger
from host.errors import HostError
from host.topology import Topology

ASK_KUBELET = 0.5  # seconds, for a hint while a pod waits

_log = logging.getLogger(__name__)


class Nearness:
    """Answers for the containers of this node. Any thread may use it."""

    def __init__(self, paths: Paths, ledger: Ledger, kubelet: PodResourcesClient) -> None:
        self._paths = paths
        self._ledger = ledger
        self._kubelet = kubelet

    def hcas(self, rows: Iterable[PodDevices]) -> list[str]:
        """The addresses of the HCAs of our pools in a container's rows."""
        keys = [(row.resource, device_id) for row in rows for device_id in row.ids]
        return sorted({address for key in keys for address in self._addresses(*key)})

    def waiting_hcas(self, ours: Collection[str]) -> list[str]:
        """The HCAs of the one container that has some and none of the resources `ours`.

        The kubelet may be allocating for it now. [] if it is not known (see `demand`).
        """
        if not any(entry.devices for entry in self._ledger.allocations()):
            return []
        try:
            rows = records.from_answer(self._kubelet.list(ASK_KUBELET))
            finished = records.from_checkpoint(self._paths)
        except KubeletUnreadable as error:
            _log.debug("the container's HCAs are unknown: %s", error)
            return []
        return waiting(rows, ours, self._addresses, finished)

    def costs(self, gpus: Collection[str], hcas: Sequence[str]) -> dict[str, int]:
        """How far each GPU is from these HCAs together, in the costs of docs/allocation.md.

        All are equal without HCAs, and if the topology cannot be read.
        """
        if not hcas:
            return {}
        try:
            topology = Topology.read(self._paths, {*gpus, *hcas})
        except HostError as error:
            _log.warning("%s: GPUs are chosen without the topology", error)
            return {}
        return {gpu: sum(COSTS[topology.distance(gpu, hca)] for hca in hcas) for gpu in gpus}

    def _addresses(self, resource: str, device_id: str) -> list[str]:
        held = self._ledger.held(resource).get(device_id)
        devices = held.devices if held is not None else ()
        return [device.address for device in devices if device.address]
