"""The ledger against the kubelet's own records: what only they know is taken over."""

import logging
from collections.abc import Mapping

from deviceplugin import claims
from deviceplugin.grants import devinfo
from deviceplugin.kubelet import records
from deviceplugin.kubelet.pod_resources import Connection
from deviceplugin.kubelet.records import PodDevices, Unreadable
from deviceplugin.ledger import Ledger
from deviceplugin.offer import Offer
from host.paths import Paths

ASK_KUBELET = 2.0  # seconds

_log = logging.getLogger(__name__)


class Comparison:
    """Of the ledger with the kubelet's records, again and again, by one thread."""

    def __init__(self, paths: Paths, ledger: Ledger, kubelet: Connection) -> None:
        self._paths = paths
        self._ledger = ledger
        self._kubelet = kubelet
        self._problem = ""

    def compare(self, offers: Mapping[str, Offer]) -> bool:
        """Adopt what only the kubelet knows, drop what it has forgotten; whether there was any.

        Raises OSError.
        """
        changed = False
        known, problems = self._known()
        keys = {(one.resource, known_id) for one in known for known_id in one.ids}
        for name, offer in list(offers.items()):
            held = self._ledger.held(name)
            missing = sorted(i for resource, i in keys if resource == name and i not in held)
            adopted = {i: devices for i in missing if (devices := offer.devices_of(i))}
            if adopted:
                self._ledger.grant(name, adopted, adopted=True)
                _log.info("%s: taken over from the kubelet: %s", name, ", ".join(adopted))
                changed = True
        if problems:
            return changed
        for resource, device_id in self._ledger.drop_unknown(keys):
            _log.info("%s: %s is free again", resource, device_id)
            changed = True
        try:
            devinfo.remove_stale(self._paths, self._ledger.keys)
        except OSError as error:
            _log.warning("device information of what is free again: %s", error)
        pods = {(one.namespace, one.name) for one in known if one.name}
        claims.prune(self._paths, pods, {one.uid for one in known if one.uid})
        return changed

    def _known(self) -> tuple[list[PodDevices], list[str]]:
        """The rows of both of the kubelet's records, and what keeps one from being read."""
        known: list[PodDevices] = []
        problems = []
        try:
            known += records.from_checkpoint(self._paths)
        except Unreadable as error:
            problems.append(str(error))
        try:
            known += records.told(self._kubelet.list(ASK_KUBELET))
        except Unreadable as error:
            problems.append(str(error))
        problem = "; ".join(problems)
        if problem and problem != self._problem:
            _log.warning("the kubelet's allocations: %s", problem)
        self._problem = problem
        return known, problems
