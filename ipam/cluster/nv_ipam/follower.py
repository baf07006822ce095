"""Follows nv-ipam's pools for one node: what it may use of them, in a file that each ADD reads.

Whatever changes, this order holds: the file first loses what is not in the node's entry any more;
then the store is asked what pods hold, and the share says both; and only when the other machines'
shares have been read after that, the file gets what is new. A kill at any point leaves a file that
says too little, or what is still this node's.

The file also says when the shares were confirmed: the time before the own Node object was seen, and
the shares in one consistent LIST. What is written later is as old as that. No clock of another
machine is looked at (docs/cluster-protocol.md, "Time").
"""

import threading
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam.addresses import Interval, parse, parse_interval, text
from ipam.cluster.api import ApiError, ClusterApi, Refused
from ipam.cluster.block_store import BlockStore
from ipam.cluster.events import PendingEvents
from ipam.cluster.identity import identified
from ipam.cluster.nv_ipam.neighbours import LeasedElsewhere, Neighbours, SharesWatch
from ipam.cluster.nv_ipam.node_file import NodeFile, with_lease
from ipam.cluster.nv_ipam.objects import Invalid, NvPool, allotted, elsewhere, entry_with, node_pool
from ipam.cluster.nv_ipam.overlaps import Overlaps
from ipam.cluster.nv_ipam.reports import FollowedPool, LeftToOlder, MoveReports
from ipam.cluster.nv_ipam.retries import Retries
from ipam.cluster.nv_ipam.shares import MAX_OFFLINE, Shares, common, intervals, size, without
from ipam.cluster.nv_ipam.takeover import address_pool_of, used_before, why_no_more
from ipam.cluster.pools import Unusable
from ipam.cluster.step_thread import StepThread
from ipam.confirmed import boottime
from ipam.nv_ipam import exporting
from ipam.nv_ipam.pools import NodePool, domain_of, listed
from ipam.nv_ipam.requests import of_older, taken
from ipam.ranges import merged
from ipam.store import Owner, Reservation
from ipam.store_files import StoreFiles

LOOK_EVERY = 5.0  # seconds, while pods hold what is not in the entry: a look at the store only
REST = 60.0  # seconds otherwise; a change of a pool, or of shares that block one, wakes it
CONFIRM_EVERY = 300.0  # seconds: Node object, and this machine's shares
ASK_WAIT = 5.0  # seconds; an ADD that waits takes a thread from the other pods of the node
ASKED = 60.0  # seconds for which an address that was asked for waits for its ADD
_ALL = Interval(0, (1 << 128) - 1)
_CONFIRM = "shares"  # what is tried again; no pool has that key

Source = Callable[[], Sequence[NvPool] | None]
"""All pools of a kind as they were last seen; None before that."""


class PoolFollower(StepThread):
    """Implements `ipam.nv_ipam.plugin.PoolSource`. Without `start`, `step` does what is due.

    `watch` begins a watch of the shares of a pool. `clock` is CLOCK_BOOTTIME. Only pools whose keys
    begin with `serves` are followed: `leases` is what others lease of these. `why_not` says why the
    store may lack what nv-ipam's daemon gave here: then the node hands out nothing, and its shares
    stay as they are.
    """

    def __init__(
        self,
        api: ClusterApi,
        files: StoreFiles,
        node: str,
        boot: str,
        sources: Sequence[Source],
        watch: Callable[[str], SharesWatch],
        clock: Callable[[], float] = boottime,
        serves: str = "",
        why_not: Callable[[], str | None] = lambda: None,
        leases: LeasedElsewhere | None = None,
    ) -> None:
        super().__init__("nv-ipam")
        self._api = api
        self._files = files
        self._file = NodeFile(files.directory, node, serves)
        self._serves = serves
        self._why_not = why_not
        self._unjoined: str | None = None
        self._node = node
        self._boot = boot
        self._sources = sources
        self._clock = clock
        self._shares = Shares(api, node)
        self._neighbours = Neighbours(self._shares, watch, leases)
        self._events = PendingEvents(api)
        self._reports = MoveReports(api, self._shares, self._events, node)
        self._retries = Retries(clock)
        self._working = threading.Lock()
        self._objects: dict[str, NvPool] = {}
        self._overlaps = Overlaps()
        self._gone: frozenset[str] = frozenset()
        self._views: dict[str, tuple[tuple[str, str], NodePool]] = {}
        self._asked: dict[tuple[str, int], float] = {}
        self._confirmed = 0.0
        self._confirm_at = clock()
        self._settled: set[str] = set()  # pools whose share is as it must be, and others' were read
        self.states: Mapping[str, FollowedPool] = {}

    def close(self) -> None:
        """See StepThread.close."""
        super().close()
        self._neighbours.close()

    def step(self) -> float:
        """Bring file and shares up to date; for how many seconds nothing is due then."""
        with self._working:
            self._file.claim()
            self._unjoined = self._why_not()
            self._confirm()
            seen = [pools for source in self._sources if (pools := source()) is not None]
            if len(seen) < len(self._sources):
                return LOOK_EVERY
            self._objects = {each.key: each for pools in seen for each in pools}
            self._overlaps = Overlaps(self._objects.values())
            self._gone = self._file.missing(self._objects)
            states: dict[str, FollowedPool] = {}
            for key in self._keys():
                states[key] = self.states.get(key, FollowedPool())
                if self._closed:
                    return LOOK_EVERY
                try:
                    states[key] = self._follow(key)
                except (ApiError, CNIError, OSError) as error:
                    self._settled.discard(key)
                    self._shares.forget(key)
                    self._retries.failed(key)
                    self._reports.say(key, f"{key}: {error} (tried again)")
            for key in self.states.keys() - states.keys():
                self._retries.worked(key)
                self._neighbours.forget(key)
            self._file.forget_missing(self._objects.keys(), self._settled)
            self.states = states
        self._events.send()
        if any(each.is_moving or (each.blocked and self._serves) for each in states.values()):
            return LOOK_EVERY
        due = self._confirm_at - self._clock() if self._retries.is_due(_CONFIRM) else REST
        return min(REST, self._retries.wait(), max(due, 0.0))

    def _keys(self) -> list[str]:
        """All pools to look at. Gone ones, of which this node may still have a share, come last:
        all others know of them then."""
        unsettled = self.states.keys() - self._settled
        keys = {*self._objects, *self._file.known().pools, *unsettled, *self._shares.pools()}
        served = (key for key in keys if key.startswith(self._serves))
        return sorted(served, key=lambda key: (key not in self._objects, key))

    # --- confirmation ------------------------------------------------------------------------

    def silence(self, key: str) -> str:
        """See PoolSource.silence."""
        return self._reports.said(_CONFIRM) or self._reports.said(key)

    def _confirm(self) -> None:
        """See the own Node object and the own shares, if that is due."""
        at = self._clock()
        if self._confirmed <= at < self._confirm_at or not self._retries.is_due(_CONFIRM):
            return
        known = self._file.known()
        try:
            holder = identified(self._api, BlockStore(self._files), self._node, self._boot)
            self._shares.read(holder, takes_unnamed=not known.is_named)
        except (ApiError, Unusable, CNIError) as error:
            self._shares.node_is_unseen()
            self._retries.failed(_CONFIRM)
            self._reports.say(_CONFIRM, f"cannot confirm the shares: {error} (tried again)")
            return
        self._retries.worked(_CONFIRM)
        self._reports.say(_CONFIRM, "")
        self._confirmed, self._confirm_at = at, at + CONFIRM_EVERY
        pools = {key: self._as_listed(key, pool) for key, pool in known.pools.items()}
        is_named = known.is_named or not self._shares.unnamed
        self._file.write_all(pools, is_named=is_named)

    def _as_listed(self, key: str, pool: NodePool) -> NodePool:
        """The pool, confirmed; or with nothing to hand out until the others' shares are read again,
        if its share is not the one by which they have left it alone."""
        share = self._shares.own(key)
        needed = (*_runs(pool.usable), *_runs(pool.beside))
        try:
            is_whole = share is not None and not without(needed, intervals(share))
        except CNIError:
            is_whole = False
        if share is None and not needed:
            return pool
        if share is None or share.metadata.uid != pool.share or not is_whole:
            self._settled.discard(key)
            return replace(pool, share="", confirmed=0.0)
        return self._leased(key, pool)

    def _leased(self, key: str, pool: NodePool) -> NodePool:
        """The pool with the share that it has now: confirmed, if the share is in force."""
        share = self._shares.own(key)
        if share is None:
            return replace(pool, share="", confirmed=0.0)
        pool = replace(pool, share=share.metadata.uid)
        if not self._shares.is_active(key):
            return pool
        limits = {"boot": self._boot, "confirmed": self._confirmed, "max_offline": MAX_OFFLINE}
        return replace(pool, **limits)

    # --- one pool ----------------------------------------------------------------------------

    def _follow(self, key: str) -> FollowedPool:
        old = self._file.known().pools.get(key)
        new = self._view(key, old)
        whole = self._overlaps.given(key, allotted(new)) if new is not None else ()
        before = {*(old.overlapping if old is not None else ()), *self._gone} - {key}
        overlapping = self._overlaps.of(key, before)
        if self._unjoined is not None:
            return self._left_alone(key, new and replace(new, overlapping=overlapping), whole)
        entry, older = self._overlaps.left_by(key, whole), self._overlaps.older(key, whole)
        usable = common(entry, _runs(old.usable)) if old is not None else ()
        beside = self._beside(key, old, entry) if new is not None else ()
        now = new and replace(new, older=older, overlapping=overlapping)
        now = now and with_lease(replace(now, usable=listed(usable), beside=beside), old)
        self._file.write(key, now)
        # From here on no ADD begins with a lost address; those before have their reservations.
        asked = _runs(beside)
        held = self._held(key)
        outside = without(held, (*whole, *asked))
        left = LeftToOlder(size(whole) - size(entry), older)
        if self._shares.is_read and self._retries.is_due(key):
            usable = self._share(key, now, entry, merged((*entry, *held, *asked)))
            blocked = self._neighbours.blocked(key, entry)
            others = self._neighbours.of(key)
            holders = self._holders(key, outside)
            self._reports.tell(key, self._objects.get(key), holders, blocked, others, left)
            self._neighbours.keep_watch(key, self._neighbours.blocking(key, entry))
            self._settled.add(key)
            self._retries.worked(key)
            self._reports.say(key, "")
        blocked = self._neighbours.blocked(key, entry)
        counts = (size(usable), size(blocked), size(outside), len(beside), left.size)
        return FollowedPool(size(whole), *counts)

    def _left_alone(
        self, key: str, new: NodePool | None, entry: Sequence[Interval]
    ) -> FollowedPool:
        """Hand out nothing of the entry: pods may have any address of it."""
        self._settled.discard(key)
        nothing = {"usable": (), "beside": (), "share": "", "confirmed": 0.0}
        self._file.write(key, new and replace(new, **nothing))
        if exporting.is_complete(self._files):
            self._shares.hand_over(key)
        if entry:
            self._reports.say(key, f"{key}: this node's entry stays as it is: {self._unjoined}")
        return FollowedPool(size(entry))

    def _share(
        self, key: str, now: NodePool | None, entry: Sequence[Interval], wanted: Sequence[Interval]
    ) -> tuple[Interval, ...]:
        """Write the share, then read those of others where that may show something new; what is
        usable then."""
        share = self._shares.own(key)
        is_wider = bool(without(wanted, intervals(share) if share is not None else ()))
        if now is not None and now.share and (share is None or share.metadata.uid != now.share):
            # Somebody deleted the share: all of it may be another's.
            now = replace(now, share="", confirmed=0.0)
            self._file.write(key, now)
        has_prefix = bool(self._serves) and now is not None and bool(now.first)
        self._shares.write(key, wanted, keeps=has_prefix)
        if now is None:
            self._neighbours.forget(key)
            return ()
        usable, foreign = _runs(now.usable), self._neighbours.intervals(key)
        is_new = is_wider or key not in self._settled or (wanted and not now.share)
        is_old = usable != without(entry, foreign) or self._neighbours.has_news(key, entry)
        if is_new or is_old or not self._neighbours.were_read_with(key, now.overlapping):
            self._neighbours.read(key, now.overlapping, entry)
            foreign = self._neighbours.intervals(key)
            with_shares = {each.pool for each in self._neighbours.of(key)} - {key}
            overlapping = self._overlaps.of(key, with_shares)
            beside = tuple(each for each in now.beside if not common(_runs((each,)), foreign))
            free = replace(now, usable=listed(without(entry, foreign)), beside=beside)
            now = self._allowed(key, now, replace(free, overlapping=overlapping))
            usable = _runs(now.usable)
        self._file.write(key, self._leased(key, now))
        return usable

    def _allowed(self, key: str, last: NodePool, free: NodePool) -> NodePool:
        """What of the pool this node may use: what is `free`, while no node leases addresses of it
        in mode own. The share was written before."""
        before = used_before(last, free)
        name = address_pool_of(self._api, key) if before != free else ""
        self._reports.say(f"{key}: own", f"{key}: {why_no_more(name)}" if name else "")
        return before if name else free

    def _view(self, key: str, old: NodePool | None) -> NodePool | None:
        """The node's part as the pool says it; None of a pool that is gone."""
        pool = self._objects.get(key)
        if pool is None:
            self._views.pop(key, None)
            return None
        version = (pool.metadata.uid, pool.metadata.resource_version)
        last, view = self._views.get(key, (("", ""), None))
        if view is not None and last == version:
            return view
        try:
            view = node_pool(pool, self._node)
        except Invalid as error:
            self._reports.say(f"{key}: spec", f"nv-ipam's pool {key} cannot be used: {error}")
            return old and replace(old, first="", last="", excluded=())
        self._views[key] = (version, view)
        self._reports.say(f"{key}: spec", "")
        return view

    def _beside(self, key: str, old: NodePool | None, entry: Sequence[Interval]) -> tuple[str, ...]:
        """Which addresses outside of the entry were asked for, and are held or soon will be."""
        kept = []
        for written in old.beside if old is not None else ():
            address = parse(written)
            asked_at = self._asked.setdefault((key, address), self._clock())
            is_inside = bool(common(entry, (Interval(address, address),)))
            is_due = self._clock() - asked_at < ASKED
            if not is_inside and (is_due or self._holders(key, (Interval(address, address),))):
                kept.append(written)
            else:
                del self._asked[key, address]
        return tuple(kept)

    def _held(self, key: str) -> tuple[Interval, ...]:
        with self._files.transaction() as tables:
            return merged(tables.runs_in(domain_of(key), _ALL))

    def _holders(self, key: str, runs: Sequence[Interval]) -> list[Reservation]:
        if not runs:
            return []
        with self._files.transaction() as tables:
            return [held for run in runs for held in tables.within(domain_of(key), run)]

    # --- what ADDs ask -----------------------------------------------------------------------

    def ask(self, key: str, address: int) -> None:
        """See PoolSource.ask: write it into the share, then read the others."""
        if not self._working.acquire(timeout=ASK_WAIT):
            raise _not_now(key, address, "other requests of this node wait for the API server")
        try:
            self._ask(key, address)
        finally:
            self._working.release()

    def _ask(self, key: str, address: int) -> None:
        one = (Interval(address, address),)
        pool, old = self._objects.get(key), self._file.known().pools.get(key)
        if pool is None or old is None or key not in self._settled:
            raise _not_now(key, address, "this node has not read the pool yet")
        entry = entry_with(pool, address)
        if entry is not None and entry.node != self._node and text(address) != old.gateway:
            raise taken(old, address, f"node {entry.node}, whose entry has it")
        if older := self._overlaps.older(key, one):
            raise of_older(old, address, older)
        self._wake.set()  # the share is mended if anything fails
        try:
            share = self._shares.own(key)
            self._shares.write(key, (*(intervals(share) if share else ()), *one))
            overlapping = self._overlaps.of(key, old.overlapping)
            for other in self._neighbours.now(key, overlapping, one):
                if common(other.intervals, one):
                    self._settled.discard(key)
                    raise taken(old, address, other.whose)
            if name := address_pool_of(self._api, key):
                self._settled.discard(key)
                raise _not_now(key, address, why_no_more(name))
            self._asked[key, address] = self._clock()
            beside = tuple({*old.beside, text(address)})
            self._file.write(key, self._leased(key, replace(old, beside=beside)))
        except ApiError as error:
            self._settled.discard(key)
            self._shares.forget(key)
            what = "refuses" if isinstance(error, Refused) else "is away"
            raise _not_now(key, address, f"the API server {what}: {error}") from None
        except OSError as error:
            self._settled.discard(key)
            raise _not_now(key, address, str(error)) from None

    def elsewhere(self, key: str) -> str:
        """See PoolSource.elsewhere."""
        pool = self._objects.get(key)
        if pool is None:
            return "what other nodes have is not known"
        nodes, addresses = elsewhere(pool, self._node)
        return f"{nodes} other nodes have {addresses} addresses of it"

    def failed(self, owner: Owner, error: CNIError) -> None:
        """See PoolSource.failed."""
        if error.code == Code.NO_FREE_ADDRESS:
            self._events.of_pod("AddressPoolExhausted", error.message, owner.pod)
            self._wake.set()


def _runs(written: Sequence[str]) -> tuple[Interval, ...]:
    return tuple(map(parse_interval, written))


def _not_now(key: str, address: int, why: str) -> CNIError:
    return CNIError(
        Code.TRY_AGAIN,
        f"cannot ask for {text(address)} of {key}: {why}: nothing was reserved; the runtime tries "
        "again",
    )
