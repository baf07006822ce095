"""Writes this node's FabricNode on the API server.

The agent looks every second whether the node has changed. The agent writes changed faults at most
every `FAULT_PAUSE` seconds, and other changes at most every `PAUSE` seconds. Nothing is written if
there is no API server or no kind FabricNode.
"""

import logging
import os
import platform
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
from prometheus_client.metrics_core import Metric

from agent import leasing
from agent.observe import hca_metrics, pod_counters
from agent.observe.metrics import installed_version
from agent.observe.node_events import IN_CLUSTER, TOKEN
from base import decoding
from base.loop import Backoff, StepThread
from base.paths import Paths
from base.pod import Pod
from base.problems import Problems
from base.text import printable
from cni.spec.errors import CNIError
from cni.spec.request import Request
from deviceplugin.checkpoint import CheckpointDamaged
from deviceplugin.health import Health
from deviceplugin.inventory import Inventory
from deviceplugin.pools.pool_config import ConfigError
from gpu.driver.gpu_inventory import GpuMemory
from host.errors import HostError
from node import fabric_node, node_hcas, observation, state, usage
from node.attachment_faults import AttachmentHealth
from node.fabric_node import FabricNode, FabricNodeStatus, HcaStatus, RefusalStatus
from node.page.feed import Feed
from node.state import ThisNode
from node.usage import NO_USAGE

if TYPE_CHECKING:
    from kube.client import ClusterApi

LOOK = 1.0  # seconds
LOOK_AGAIN = 0.5  # seconds, while the change of a port is too recent to be reported
RATES_EVERY = 10.0  # seconds between checks of the rates of ports, of P_Keys and of MTUs
RESCAN_EVERY = 60.0  # seconds between full looks, for changes that the checks miss
PAUSE = 10.0  # seconds between two writes
FAULT_PAUSE = 2.0  # seconds between two writes, if the faults have changed
STEADY_PAUSE = 60.0  # seconds between two writes, if only numbers that change often have changed
MEASURE_EVERY = 2.0  # seconds between two measurements of what pods use, at least
COUNT_EVERY = 30.0  # seconds between two counts of RDMA objects, if the totals stay the same
_MEASURE_PAUSE = 50  # the pause after a measurement, in multiples of its duration
FAULT = "FabricFault"
WARNING = "FabricWarning"
MOST_REFUSALS = 16
MOST_OF_NAMESPACE = 4  # refusals
_LONGEST_TEXT = 300  # characters of an error
_REMEMBERED = 3600.0  # seconds for which a failed ADD is shown
_LONGEST = 120.0  # seconds from a failed write to the next attempt
_FOR_LONG = 600.0  # seconds until the next search for an API server

_log = logging.getLogger(__name__)


class NodeReport(StepThread):
    """Updates the FabricNode of this node. `mistakes` returns the errors of config.yaml by section.

    `tell_pod` and `tell_node` write an event on a pod and on this node. `api` returns a client, or
    `None` without an API server.
    """

    def __init__(
        self,
        paths: Paths,
        mistakes: Callable[[], Mapping[str, str]],
        tell_pod: Callable[[str, str, Pod], object],
        environ: Mapping[str, str] = os.environ,
        api: "Callable[[Mapping[str, str]], ClusterApi | None] | None" = None,
        tell_node: Callable[[str, str], object] = lambda reason, text: None,
    ) -> None:
        super().__init__("node-report")
        self._paths = paths
        self._mistakes = mistakes
        self._tell_pod, self._tell_node = tell_pod, tell_node
        self._environ = environ
        self._make_api = api or _client
        self._api: ClusterApi | None = None
        name = environ.get(leasing.NODE_NAME) or platform.node()
        self.feed = Feed(lambda: [(name, self._status)])
        self._status = FabricNodeStatus()
        self._node: ThisNode | None = None  # of the last look
        self._stored: FabricNode | None = None
        self._write_at = float("-inf")  # not before this time
        self._backoff = Backoff(PAUSE, _LONGEST)
        self._problems = Problems(_log)
        self._lock = threading.Lock()  # guards `_refusals`
        self._refusals: dict[tuple[str, ...], tuple[float, RefusalStatus]] = {}  # with the time
        self._usage = NO_USAGE
        self._measured: ThisNode | None = None  # the node at the last count of RDMA objects
        self._gpu_memory: Mapping[str, GpuMemory] = {}
        self._faulty: set[tuple[Pod, str]] = set()  # in the last look
        self._inventory, self._health = Inventory(paths), Health()
        self._attached = AttachmentHealth()
        self._known: dict[str, HcaStatus] = {}  # HCAs for which `_is_missed` was true
        self._since: dict[tuple[str, str], str] = {}  # of faults, by device and text
        self._looked = self._rates_read = self._measure_at = self._count_at = float("-inf")
        self._seen: object = None  # the files, mistakes and refusals of the last look

    def refused(self, request: Request, error: CNIError) -> None:
        """Show a failed ADD in the FabricNode for an hour. Any thread may call this."""
        if request.command != "ADD":
            return
        pod = Pod()
        with suppress(CNIError):  # CNI_ARGS name no pod
            pod = request.arguments.pod
        refusal = RefusalStatus(  # within the lengths of the schema
            pod=printable(str(pod))[:330],
            interface=printable(request.ifname)[:15],
            network=printable(request.network)[:253],
            code=int(error.code),
            text=printable(error.message)[:_LONGEST_TEXT],
            since=_now(),
        )
        words = re.sub("[0-9]+", "", refusal.text)  # the next attempt may have another number
        key = pod.namespace, refusal.pod, refusal.interface, words
        with self._lock:
            at, first = self._refusals.get(key, (time.monotonic(), refusal))
            self._refusals[key] = at, msgspec.structs.replace(refusal, since=first.since)
            ((crowded, most),) = Counter(each[0] for each in self._refusals).most_common(1)
            if most > MOST_OF_NAMESPACE or len(self._refusals) > MOST_REFUSALS:
                del self._refusals[next(each for each in self._refusals if each[0] == crowded)]

    def families(self) -> Iterable[Metric]:
        """The metrics of HCAs and of the pods that hold HCAs."""
        if self._node is not None:
            with suppress(ConfigError, CheckpointDamaged):  # the FabricNode has the fault
                listed = node_hcas.listed(self._node)
                yield from hca_metrics.families(listed, self._status.hcas)
            yield hca_metrics.objects(self._status.objects)
        yield from pod_counters.families(self._paths)

    def _recent(self) -> list[RefusalStatus]:
        oldest = time.monotonic() - _REMEMBERED
        with self._lock:
            self._refusals = {key: of for key, of in self._refusals.items() if of[0] > oldest}
            return [refusal for _, refusal in self._refusals.values()]

    @property
    def _pending(self) -> bool:
        return self._health.pending or self._attached.pending

    def _may_differ(self, mistakes: Mapping[str, str], refusals: Sequence[RefusalStatus]) -> bool:
        """Whether the node may differ from the last look. Costs less than a look."""
        now = time.monotonic()
        rates = now - self._rates_read >= RATES_EVERY
        self._rates_read = now if rates else self._rates_read
        seen = state.versions(self._paths), mistakes, refusals
        if (
            now - self._looked < RESCAN_EVERY
            and seen == self._seen
            and not self._pending
            and not self._inventory.differs(rates=rates)
            and not (rates and self._attached.differs(self._paths))
        ):
            return False
        self._looked, self._seen = now, seen
        return True

    def _look(self) -> None:
        """Update the status. Writes an event on each pod with a new fault."""
        mistakes, refusals = self._mistakes(), self._recent()
        if not self._may_differ(mistakes, refusals):
            return
        node = ThisNode(
            self._paths,
            tolerant=True,
            inventory=self._inventory,
            health=self._health,
            former=self._node.config if self._node is not None else None,
        )
        if self._gpu_memory:  # to ask the driver costs much, and the memory does not change
            node.gpu_memory = self._gpu_memory
        version, attached = installed_version(), self._attached
        status = observation.observed(node, mistakes, version, refusals, attached, self._known)
        self._known |= {hca.id: hca for hca in status.hcas if _is_missed(hca)}
        self._gpu_memory, self._node = node.gpu_memory, node
        faulty = set(observation.pods_with_faults(node, status, attached))
        for pod, text in faulty - self._faulty:
            self._tell_pod(FAULT, text, pod)
        self._faulty = faulty
        for text in status.warnings:
            if text not in self._status.warnings:
                self._tell_node(WARNING, text)
        self._show(fabric_node.with_usage(self._with_times(status), self._usage))

    def _with_times(self, status: FabricNodeStatus) -> FabricNodeStatus:
        """The status with the time when each fault was first seen."""
        now, before = _now(), self._since
        self._since = {
            (fault.about, fault.text): before.get((fault.about, fault.text), now)
            for fault in status.faults
        }
        faults = (
            msgspec.structs.replace(fault, since=self._since[fault.about, fault.text])
            for fault in status.faults
        )
        return msgspec.structs.replace(status, faults=tuple(faults))

    def _measure(self) -> None:
        """Measure what pods use, unless the last measurement is too recent."""
        began, node = time.monotonic(), self._node
        if node is None or began < self._measure_at:
            return
        known = node is self._measured and began < self._count_at
        self._usage = usage.measured(node, self._usage if known else NO_USAGE)
        if not known:
            self._measured, self._count_at = node, began + COUNT_EVERY
        self._problems.tell("RDMA objects", self._usage.problem or None)
        now = time.monotonic()
        self._measure_at = now + max(MEASURE_EVERY, _MEASURE_PAUSE * (now - began))
        self._show(fabric_node.with_usage(self._status, self._usage))

    def _show(self, status: FabricNodeStatus) -> None:
        if msgspec.structs.replace(status, written=self._status.written) != self._status:
            self._status = msgspec.structs.replace(status, written=_now())
            self.feed.changed()

    def step(self) -> float:
        try:
            self._look()
            self._measure()
        except (CNIError, HostError, OSError) as error:
            self._seen = None
            self._problems.tell("FabricNode", error)
            return LOOK
        if self._is_due(now := time.monotonic()):
            self._write_at = now + self._written()
        return LOOK_AGAIN if self._pending else LOOK

    def _is_due(self, now: float) -> bool:
        """Whether the status differs from the stored status, and may be written now."""
        if self._stored is None:
            return now >= self._write_at
        wanted = fabric_node.fitted(self._status)
        stored = msgspec.structs.replace(self._stored.status, written=wanted.written)
        if wanted == stored:
            return False
        pause = STEADY_PAUSE
        if fabric_node.steady(wanted) != fabric_node.steady(stored):
            pause = FAULT_PAUSE if wanted.faults != stored.faults else PAUSE
        return now >= self._write_at - PAUSE + pause

    def _written(self) -> float:
        """Write the status. Returns the seconds until the next write may begin."""
        from kube.resources import ApiError

        if self._api is None:
            self._api = self._make_api(self._environ)
            if self._api is None:
                return _FOR_LONG
            decoding.build_decoders()  # of the modules imported above
        try:
            self._stored = self._write(self._api, self._status)
        except ApiError as error:
            self._stored = None
            self._problems.tell("FabricNode", error)
            return self._backoff.pause()
        self._problems.tell("FabricNode", None)
        self._backoff.reset()
        return PAUSE

    def _write(self, api: "ClusterApi", status: FabricNodeStatus) -> FabricNode:
        """Write the status. The Node owns the object, so deleting the Node deletes the object."""
        from kube.resources import Meta, Node, NotFound

        name, stored = self._environ[leasing.NODE_NAME], self._stored
        if stored is None:
            try:
                stored = api.get(FabricNode, name)
            except NotFound:
                node = api.get(Node, name)
                owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": node.uid}
                meta = Meta(name=name, owner_references=(owner,))
                stored = api.create(FabricNode(metadata=meta))
        status = fabric_node.fitted(status)
        return api.update_status(msgspec.structs.replace(stored, status=status))


def _is_missed(hca: HcaStatus) -> bool:
    """Whether the HCA is a fault once it is gone: a PCI function in a pool, but not a VF.

    Administrators remove VFs and software devices.
    """
    return hca.present and bool(hca.pools) and not hca.pf and ":" in hca.id


def _client(environ: Mapping[str, str]) -> "ClusterApi | None":
    """A client, or `None` if the environment names no node or no API server."""
    in_pod = IN_CLUSTER in environ and TOKEN.exists()
    if not environ.get(leasing.NODE_NAME) or not (in_pod or leasing.KUBECONFIG in environ):
        return None
    return leasing.api_of(environ, "a FabricNode is to be written", "no FabricNode shows this node")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
