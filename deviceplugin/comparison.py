"""The ledger against the kubelet's own records: what only they know is taken over."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping

from base.paths import Paths
from deviceplugin import adoption, pod_devices
from deviceplugin.allocate import device_info
from deviceplugin.checkpoint import AllocatedHCA
from deviceplugin.kubelet import records
from deviceplugin.kubelet.pod_resources import PodResourcesClient
from deviceplugin.kubelet.records import KubeletUnreadable, PodDevices
from deviceplugin.kubelet.server import PluginServer
from deviceplugin.ledger import Key, Ledger
from deviceplugin.pool_service import Offer

ASK_KUBELET = 2.0  # seconds

PodsKnown = Callable[[Collection[tuple[str, str]], Collection[str]], object]
"""Gets the (namespace, name) and the UIDs of all pods that hold devices, after each comparison."""

_log = logging.getLogger(__name__)


class Comparison:
    """Of the ledger with the kubelet's records, again and again, by one thread."""

    def __init__(
        self,
        paths: Paths,
        ledger: Ledger,
        kubelet: PodResourcesClient,
        pods_known: PodsKnown = lambda names, uids: None,
    ) -> None:
        self._pods_known = pods_known
        self._paths = paths
        self._ledger = ledger
        self._kubelet = kubelet
        self._problem = ""

    def compare(self, offers: Mapping[str, Offer], servers: Mapping[str, PluginServer]) -> bool:
        """Adopt what only the kubelet knows, drop what it has forgotten; whether there was any.

        The kubelet frees what a pod had without writing it down, so its checkpoint may have ids
        for good that PodResources has no more: the `servers` send their lists again then, and each
        has the kubelet write it. Raises OSError.
        """
        noted, told, problems = self._known()
        known = [*noted, *told]
        changed = self._adopt_all(offers, known)
        if not problems:
            changed |= self._forget(known)
            ours = {*offers, *(one.resource for one in self._ledger.allocations())}
            if any(resource in ours for resource, _ in _keys(noted) - _keys(told)):
                for server in list(servers.values()):
                    server.changed(again=True)
        return changed

    def take_over(self, offers: Mapping[str, Offer]) -> None:
        """Adopt what the kubelet has written down, which need not run yet. Raises OSError.

        Before anything is offered: what was granted right before a power cut may stand there alone.
        """
        try:
            self._adopt_all(offers, records.from_checkpoint(self._paths, nodes=True))
        except KubeletUnreadable as error:
            self._tell(str(error))

    def _adopt_all(self, offers: Mapping[str, Offer], known: Collection[PodDevices]) -> bool:
        changed = False
        for name, offer in list(offers.items()):
            changed |= self._adopt(name, offer, [row for row in known if row.resource == name])
            offer.restore_device_information()
        return changed

    def _adopt(self, name: str, offer: Offer, rows: Iterable[PodDevices]) -> bool:
        held = self._ledger.held(name)
        found: dict[str, tuple[AllocatedHCA, ...]] = {}
        for row in rows:
            entries = [held[known] for known in row.ids if known in held]
            wanted = [known for known in row.ids if known not in held or not held[known].devices]
            if not adoption.agree(entries, row):
                wanted = list(row.ids)
            if wanted:
                devices = offer.devices_of(row)
                # The kubelet's checkpoint comes first: it has the nodes.
                found = {known: devices[known] for known in wanted} | found
        # Not what was granted since the boot: the row may be that of a pod before.
        moot = {
            known: one
            for known, one in held.items()
            if not one.devices or one.adopted or one.boot_id != self._ledger.boot_id
        }
        unknown = sorted(known for known in found if not found[known] and known not in held)
        adopted = {
            known: devices
            for known, devices in found.items()
            if devices and (known not in held or (known in moot and devices != moot[known].devices))
        }
        if not adopted and not unknown:
            return False
        self._ledger.adopt(name, adopted | dict.fromkeys(unknown, ()), moot)
        if adopted:
            _log.info("%s: taken over from the kubelet: %s", name, ", ".join(sorted(adopted)))
        if unknown:
            _log.warning(
                "%s: %s: nothing tells which HCA that is: %s",
                name,
                ", ".join(unknown),
                pod_devices.NOT_TOLD,
            )
        return True

    def _forget(self, known: Collection[PodDevices]) -> bool:
        gone = self._ledger.drop_unknown(_keys(known))
        for resource, device_id in gone:
            _log.info("%s: %s is free again", resource, device_id)
        try:
            device_info.remove_stale(self._paths, self._ledger.keys)
        except OSError as error:
            _log.warning("device information of what is free again: %s", error)
        names = {(row.namespace, row.name) for row in known if row.name}
        self._pods_known(names, {row.uid for row in known if row.uid})
        return bool(gone)

    def _known(self) -> tuple[list[PodDevices], list[PodDevices], list[str]]:
        """The rows of the kubelet's checkpoint, those of PodResources, and what hides either."""
        noted: list[PodDevices] = []
        told: list[PodDevices] = []
        problems = []
        try:
            noted = records.from_checkpoint(self._paths, nodes=True)
        except KubeletUnreadable as error:
            problems.append(str(error))
        try:
            told = records.told(self._kubelet.list(ASK_KUBELET))
        except KubeletUnreadable as error:
            problems.append(str(error))
        self._tell("; ".join(problems))
        return noted, told, problems

    def _tell(self, problem: str) -> None:
        """Log what hides the kubelet's records, once while it stays the same."""
        if problem and problem != self._problem:
            _log.warning("the kubelet's allocations: %s", problem)
        self._problem = problem


def _keys(rows: Iterable[PodDevices]) -> set[Key]:
    return {(row.resource, known) for row in rows for known in row.ids}
