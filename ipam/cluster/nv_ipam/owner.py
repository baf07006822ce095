"""Brings IPPools of nv-ipam to this node, where podfabric leases their addresses (`own`).

It writes what the pools say into a file that each ADD reads, finds out whether the AddressPool of
each excludes what nodes may hold that have not joined, and lets this node join: its share is then
what its pods hold outside of the blocks that it leases. A share is written after all that nv-ipam's
daemon gave here is in the store, and never has less than that, so others get no address of it.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from base.text import printable
from cni.spec.errors import CNIError, Code
from ipam.addresses import Interval
from ipam.cluster.api import AlreadyExists, ApiError, ClusterApi, NotFound
from ipam.cluster.block_store import BlockStore
from ipam.cluster.identity import identified
from ipam.cluster.nv_ipam.objects import Invalid, NvCIDRPool, NvIPPool, NvIPPoolEntry, NvPool
from ipam.cluster.nv_ipam.overlaps import Overlaps
from ipam.cluster.nv_ipam.own_pools import (
    TAKEN_OVER,
    allocations_of,
    handed_back,
    name_of,
    own_node_pool,
)
from ipam.cluster.nv_ipam.shares import JOINED, MAX_OFFLINE, coarse, share_name, without
from ipam.cluster.objects import AddressPool, AddressShare, Holder, Meta, ShareSpec
from ipam.cluster.pools import Unusable
from ipam.cluster.step_thread import StepThread
from ipam.nv_ipam import importing
from ipam.nv_ipam.pools import OWN_FILE, NodePool, NodePools, PoolsFile, domain_of, listed
from ipam.store_files import StoreFiles

LOOK_EVERY = 5.0  # seconds, while something is missing
REST = 60.0  # seconds otherwise; a change of a pool wakes the thread
COMPARE_EVERY = 300.0  # seconds, shares and the Node's labels with those on the API server
_ALL = Interval(0, (1 << 128) - 1)

Source = Callable[[], Sequence[NvIPPool] | None]
"""All IPPools as they were last seen; None before that."""

_log = logging.getLogger(__name__)


class PoolOwner(StepThread):
    """For the node `node`. `daemon_store` is the file of nv-ipam's daemon, `routed` are the
    CIDRPools. Without `start`, `step` does what is due. `clock` is monotonic."""

    def __init__(
        self,
        api: ClusterApi,
        files: StoreFiles,
        node: str,
        boot: str,
        source: Source,
        daemon_store: Path = importing.STORE,
        clock: Callable[[], float] = time.monotonic,
        routed: Callable[[], Sequence[NvCIDRPool] | None] = tuple,
    ) -> None:
        super().__init__("nv-ipam")
        self._api = api
        self._files = files
        self._file = PoolsFile(files.directory, OWN_FILE)
        self._followed = PoolsFile(files.directory)
        self._node = node
        self._boot = boot
        self._source = source
        self._routed = routed
        self._daemon_store = daemon_store
        self._clock = clock
        self._began = clock()
        self._compared_at: float | None = None
        self._labels: Mapping[str, str] | None = None  # of the Node; None: not read
        self._holder: Holder | None = None  # this machine; None: not read
        self._shares: dict[str, AddressShare] | None = None  # its own, by pool; None: not read
        # By pool: entries that its AddressPool excludes, or whose nodes have joined since.
        self._taken_over: dict[str, frozenset[NvIPPoolEntry]] = {}
        self._told: dict[str, str] = {}

    def step(self) -> float:
        """Do what is due; for how many seconds nothing is due then."""
        pools, routed = self._source(), self._routed()
        now = self._clock()
        if pools is None or (routed is None and now - self._began < REST):
            return LOOK_EVERY
        routed = routed or ()  # the kind is not installed, or not read: AddressPools know of it
        if self._compared_at is None or now - self._compared_at >= COMPARE_EVERY:
            self._labels = self._holder = self._shares = None
            self._compared_at = now
        is_well = self._guarded("the pools", lambda: self._write_file(pools, (*pools, *routed)))
        self._taken_over = {
            pool.key: self._taken_over[pool.key] for pool in pools if pool.key in self._taken_over
        }
        for pool in pools:
            if self._closed:
                break
            is_well &= self._guarded(pool.key, partial(self._look_up, pool))
            is_well &= self._guarded(f"{pool.key}: share", partial(self._join, pool))
        return REST if is_well else LOOK_EVERY

    def _guarded(self, what: str, work: Callable[[], None]) -> bool:
        """Whether it went well. What did not is logged once, and tried again."""
        try:
            work()
        except (ApiError, CNIError, Invalid, Unusable, OSError) as error:
            said = printable(f"nv-ipam: {what}: {error}")
            if self._told.get(what) != said:
                _log.warning("%s (tried again)", said)
            self._told[what] = said
            return False
        if self._told.pop(what, None):
            _log.info("nv-ipam: %s: works again", what)
        return True

    # --- the file ----------------------------------------------------------------------------

    def _write_file(self, pools: Sequence[NvIPPool], beside: Sequence[NvPool]) -> None:
        if any(pool.spec.node_selector is not None for pool in pools) and self._labels is None:
            self._labels = self._api.node(self._node).labels
        known = self._known()
        former = known.pools if known is not None else {}
        overlaps = Overlaps(beside)
        views = {pool.key: self._view(pool, former.get(pool.key), overlaps) for pool in pools}
        new = NodePools(
            node=self._node, pools={key: view for key, view in views.items() if view is not None}
        )
        if new != known:
            self._file.write(new)

    def _view(self, pool: NvIPPool, former: NodePool | None, overlaps: Overlaps) -> NodePool | None:
        """What the file says of a pool. Of one that is invalid this node hands out nothing more."""
        what = f"{pool.key}: spec"
        try:
            view = own_node_pool(pool, self._node, self._labels or {}, overlaps)
        except Invalid as error:
            self._guarded(what, partial(_raise, error))
            return former and replace(former, first="", last="", usable=(), excluded=())
        self._guarded(what, lambda: None)
        return view

    def _known(self) -> NodePools | None:
        try:
            return self._file.read()
        except CNIError as error:
            if error.code != Code.STORE_DAMAGED:
                raise
            return None  # it is written again

    # --- what may be leased ------------------------------------------------------------------

    def _look_up(self, pool: NvIPPool) -> None:
        """See whether the AddressPool excludes what nodes may hold that have not joined."""
        entries = frozenset(pool.status.allocations or ())
        if pool.key in self._taken_over and entries <= self._taken_over[pool.key]:
            return
        self._taken_over.pop(pool.key, None)
        name = name_of(pool)
        try:
            found = self._api.get(AddressPool, name)
        except NotFound:
            raise Invalid(
                f"there is no AddressPool {name}: podfabric's controller makes it from the pool: "
                "see that it runs (kubectl -n podfabric get deploy)"
            ) from None
        if found.metadata.annotations.get(TAKEN_OVER) != allocations_of(pool):
            raise Invalid(
                f"AddressPool {name} does not have the allocations of the pool's status yet: see "
                "that podfabric's controller runs, and that nv-ipam's does not"
            )
        self._taken_over[pool.key] = entries

    def why_not(self, domain: str) -> str | None:
        """Why nothing of the pool with that domain may be leased now; None if it may."""
        key = domain.removeprefix(domain_of(""))
        if key in self._taken_over:
            return None
        self.wake()
        why = self._told.get(key) or f"nv-ipam: {key}: this node has not read the pool yet"
        return f"{why}: nothing was reserved; the runtime tries again"

    # --- joining -----------------------------------------------------------------------------

    def _join(self, pool: NvIPPool) -> None:
        """Write down what this node's pods hold outside of its blocks, in place of its entry."""
        has_entry = any(each.node == self._node for each in pool.status.allocations or ())
        share = self._own_shares().get(pool.key)
        store, held = self._held(domain_of(pool.key))
        if share is None and not has_entry and not held:
            return
        why = self._why_unfinished(pool.key, store)
        if why is not None:
            raise Invalid(f"this node's entry stays as it is: {why}")
        # What an import or an ADD of mode follow wrote until now is in the store.
        now, held = self._held(domain_of(pool.key))
        if now != store:
            raise Invalid("the store of this node has just been replaced")
        if has_entry and self._is_handed_back(pool):
            raise Invalid("this node's entry is for nv-ipam's own daemon: the node was handed back")
        self._write_share(pool.key, share, listed(coarse(held)))

    def _is_handed_back(self, pool: NvIPPool) -> bool:
        """Whether nv-ipam's own daemon serves this node again (`hand_back`)."""
        try:
            return self._node in handed_back(self._api.get(AddressPool, name_of(pool)))
        except NotFound:
            return False

    def _why_unfinished(self, key: str, store: str) -> str | None:
        """Why the store of that id may lack what pods have of the pool, or soon will have."""
        followed = self._followed.read()
        if followed is not None and key in followed.pools:
            return "pods may still get addresses as in mode follow"  # its file loses the pool soon
        return importing.why_unfinished(self._daemon_store, self._files.directory, store)

    def _held(self, domain: str) -> tuple[str, tuple[Interval, ...]]:
        """The store, and what of the domain its pods hold outside of its blocks."""
        with self._files.transaction() as tables:
            blocks = [
                block.interval
                for block in tables.blocks()
                if domain in block.domains and block.state not in ("lost", "returning")
            ]
            return tables.meta.store, without(tables.runs_in(domain, _ALL), blocks)

    def _own_shares(self) -> dict[str, AddressShare]:
        """This machine's. Those of a former store of the node are not touched: what it held stays
        kept out until they are gone."""
        if self._holder is None:
            store = BlockStore(self._files)
            self._holder = identified(self._api, store, self._node, self._boot)
            self._shares = None
        if self._shares is None:
            listing = self._api.list(AddressShare, {"spec.node": self._node})
            self._shares = {
                each.spec.pool: each
                for each in listing.items
                if each.holder.instance == self._holder.instance
            }
        return self._shares

    def _write_share(self, key: str, last: AddressShare | None, ranges: tuple[str, ...]) -> None:
        """A share that the controller has fenced is active again then, as this machine lives."""
        shares, holder = self._own_shares(), self._holder
        assert holder is not None
        spec = ShareSpec(
            pool=key,
            node=self._node,
            ranges=ranges,
            holder=holder,
            max_offline_seconds=round(MAX_OFFLINE),
        )
        notes = {JOINED: "true"}
        if last is not None:
            notes = {**last.metadata.annotations, **notes}
            if (last.spec, last.metadata.annotations) == (spec, notes):
                return
        self._shares = None  # it is read again after a failure
        if last is not None:
            meta = replace(last.metadata, annotations=notes)
            shares[key] = self._api.update(replace(last, metadata=meta, spec=spec))
        else:
            meta = Meta(name=share_name(key, self._node, holder.instance), annotations=notes)
            try:
                shares[key] = self._api.create(AddressShare(metadata=meta, spec=spec))
            except AlreadyExists:
                return  # an earlier attempt's, whose answer was lost: it is read first
        self._shares = shares


def _raise(error: Exception) -> None:
    raise error
