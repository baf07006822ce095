"""Gives each node its prefix of nv-ipam's CIDRPools, as nv-ipam's controller did."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from cni.spec.errors import CNIError
from ipam.cluster.api import ApiError, ClusterApi, Conflict, Node, NotFound
from ipam.cluster.controller.machines import OUT_OF_SERVICE
from ipam.cluster.controller.reports import Reports
from ipam.cluster.controller.steps import Steps
from ipam.cluster.nv_ipam.objects import Invalid, NvCIDRPool, NvCIDRPoolStatus
from ipam.cluster.nv_ipam.prefixes import Cut, cut
from ipam.cluster.nv_ipam.selectors import selects
from ipam.cluster.objects import AddressShare

LABELS_EVERY = 300.0  # seconds; also when a Node is new
NEW_LABELS_EVERY = 10.0  # seconds at least between two reads for new Nodes

_log = logging.getLogger(__name__)


class NvPrefixes:
    """The memory of one leader. `namespace` is that of the CIDRPools, "" where they are not
    ours."""

    def __init__(
        self, api: ClusterApi, clock: Callable[[], float], reports: Reports, namespace: str
    ) -> None:
        self._api = api
        self._clock = clock
        self._reports = reports
        self._namespace = namespace
        self._labels: Mapping[str, Mapping[str, str]] = {}  # by the Node's name
        self._labels_at: float | None = None
        self._off: frozenset[str] = frozenset()  # nodes whose machines are off

    def keep(
        self,
        pools: Sequence[NvCIDRPool],
        nodes: Sequence[Node],
        shares: Sequence[AddressShare],
        steps: Steps,
    ) -> int:
        """Bring the statuses of the pools up to date; how many pools cannot be used.

        Which prefix is free must not rest on what a watch has shown: before each change it is read.
        """
        if not self._namespace or not pools:
            return 0
        present = frozenset(node.name for node in nodes)
        off = (node for node in nodes if OUT_OF_SERVICE in node.taints and not node.ready)
        self._off = frozenset(node.name for node in off)
        if any(pool.spec.node_selector is not None for pool in pools):
            try:
                self._read_labels(present)
            except ApiError as error:
                steps.failed(error)
                pools = [pool for pool in pools if pool.spec.node_selector is None]
        unusable, due = 0, []
        for pool in pools:
            try:
                wanted = self._cut(pool, present, shares)
            except (Invalid, CNIError) as error:
                unusable += 1
                self._reports.resource(
                    "InvalidPool", f"no node gets another prefix of it: {error}", pool
                )
                continue
            if wanted.entries != (pool.status.allocations or ()):
                due.append((pool.metadata.name, pool.metadata.name))
            for node in wanted.lacking:
                self._reports.resource("NoFreePrefixes", f"no prefix is free for node {node}", pool)
        steps.each("prefixes of nv-ipam", due, partial(self._write, present))
        return unusable

    def _cut(
        self, pool: NvCIDRPool, present: Collection[str], shares: Sequence[AddressShare]
    ) -> Cut:
        selector = pool.spec.node_selector
        selected = frozenset(present)
        if selector is not None:
            # A Node whose labels were not read yet is left as it is.
            known = {node for node in present if node in self._labels}
            had = {each.node for each in pool.status.allocations or ()}
            matching = (node for node in known if selects(selector, node, self._labels[node]))
            selected = frozenset((*matching, *(had & (selected - known))))
        return cut(pool, present, selected - self._off, shares)

    def _read_labels(self, present: Collection[str]) -> None:
        """Raises ApiError."""
        now = self._clock()
        if self._labels_at is not None:
            pause = NEW_LABELS_EVERY if set(present) - self._labels.keys() else LABELS_EVERY
            if now - self._labels_at < pause:
                return
        self._labels = {node.name: node.labels for node in self._api.nodes(labels=True)}
        self._labels_at = now

    def _write(self, present: Collection[str], name: str) -> None:
        """Write the entries of a pool, by what is there now."""
        listed = self._api.list(NvCIDRPool, namespace=self._namespace).items
        pool = next((each for each in listed if each.metadata.name == name), None)
        if pool is None:
            return
        shares = self._api.list(AddressShare, {"spec.pool": pool.key}).items
        try:
            wanted = self._cut(pool, present, shares)
        except (Invalid, CNIError):
            return  # the next round reports it
        former = pool.status.allocations or ()
        if wanted.entries == former:
            return
        try:
            self._api.update_status(
                replace(pool, status=NvCIDRPoolStatus(allocations=wanted.entries))
            )
        except (Conflict, NotFound):
            return  # the next round sees it
        for entry in set(former) - set(wanted.entries):
            _log.info("%s: node %s has %s no more", pool.key, entry.node, entry.prefix)
        for entry in set(wanted.entries) - set(former):
            _log.info("%s: node %s has %s", pool.key, entry.node, entry.prefix)
