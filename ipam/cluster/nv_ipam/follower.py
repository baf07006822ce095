"""Follows nv-ipam's pools for one node: what it may use of them, in a file that each ADD reads.

Whatever changes, this order holds: the file first loses what is not in the node's entry any more;
then the store is asked what pods hold, and the share says both; and only when the other nodes'
shares have been read after that, the file gets what is new. A kill at any point leaves a file that
says too little, or what is still this node's.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam.addresses import Interval, parse, parse_interval, text
from ipam.cluster.api import ApiError, ClusterApi, Refused
from ipam.cluster.events import PendingEvents
from ipam.cluster.nv_ipam.objects import Invalid, NvPool, allotted, elsewhere, entry_with, node_pool
from ipam.cluster.nv_ipam.reports import MoveReports
from ipam.cluster.nv_ipam.shares import OtherShare, Shares, common, intervals, size, without
from ipam.nv_ipam.pools import NodePool, NodePools, PoolsFile, domain_of, listed
from ipam.nv_ipam.requests import taken
from ipam.ranges import merged
from ipam.store import Owner, Reservation
from ipam.store_files import StoreFiles

LOOK_EVERY = 5.0  # seconds, while something is not as the pool says
REST = 60.0  # seconds otherwise; a change of a pool wakes the follower
COMPARE_EVERY = 300.0  # seconds, this node's shares with those on the API server
ASK_WAIT = 5.0  # seconds; an ADD that waits takes a thread from the other pods of the node
ASKED = 60.0  # seconds for which an address that was asked for waits for its ADD
_JOIN = 15.0
_ALL = Interval(0, (1 << 128) - 1)

Source = Callable[[], Sequence[NvPool] | None]
"""All pools of a kind as they were last seen; None before that."""

_log = logging.getLogger(__name__)


class FollowedPool(NamedTuple):
    """Of one pool: how many addresses the entry has, how many of them may be handed out, how many
    of them other nodes use, how many pods hold outside of it, and how many were asked for."""

    entry: int = 0
    usable: int = 0
    blocked: int = 0
    outside: int = 0
    beside: int = 0

    @property
    def is_plain(self) -> bool:
        """All is as the pool says."""
        return self.usable == self.entry and not (self.outside or self.beside)


class PoolFollower:
    """Implements `ipam.nv_ipam.plugin.PoolSource`. Without `start`, `step` does what is due."""

    def __init__(
        self,
        api: ClusterApi,
        files: StoreFiles,
        node: str,
        sources: Sequence[Source],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self._file = PoolsFile(files.directory)
        self._node = node
        self._sources = sources
        self._clock = clock
        self._shares = Shares(api, node)
        self._events = PendingEvents(api)
        self._reports = MoveReports(api, self._shares, self._events, node)
        self._working = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._objects: dict[str, NvPool] = {}
        self._asked: dict[tuple[str, int], float] = {}
        self._compared_at = clock()
        self._settled: set[str] = set()  # pools whose share is as it must be, and others' were read
        self.states: Mapping[str, FollowedPool] = {}

    # --- the thread --------------------------------------------------------------------------

    def start(self) -> None:
        """Work in a thread of its own until `close`."""
        self._thread = threading.Thread(target=self._run, name="nv-ipam", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """A pool has changed."""
        self._wake.set()

    def close(self) -> None:
        """Begin nothing more. Waits for what is under way."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_JOIN)

    def _run(self) -> None:
        while not self._closed:
            try:
                wait = self.step()
            except Exception:  # noqa: BLE001 - a defect in one step must not end the thread
                _log.exception("nv-ipam: a step failed")
                wait = LOOK_EVERY
            self._wake.wait(wait)
            self._wake.clear()

    def step(self) -> float:
        """Bring file and shares up to date; for how many seconds nothing is due then."""
        with self._working:
            if self._known().node not in ("", self._node):  # of another machine: a copied disk
                self._file.write(NodePools(node=self._node))
            seen = [pools for source in self._sources if (pools := source()) is not None]
            if len(seen) < len(self._sources):
                return LOOK_EVERY
            self._objects = {each.key: each for pools in seen for each in pools}
            states: dict[str, FollowedPool] = {}
            for key in sorted(self._keys()):
                states[key] = self.states.get(key, FollowedPool())
                if self._closed:
                    return LOOK_EVERY
                try:
                    states[key] = self._follow(key)
                    self._settled.add(key)
                    self._reports.say(key, "")
                except (ApiError, CNIError, OSError) as error:
                    self._settled.discard(key)
                    self._shares.forget(key)
                    self._reports.say(key, f"{key}: {error} (tried again)")
            self.states = states
        self._events.send()
        plain = all(each.is_plain for each in states.values()) and self._settled >= states.keys()
        return REST if plain else LOOK_EVERY

    def _keys(self) -> set[str]:
        """All pools to look at: also gone ones of which this node still has a share."""
        if self._clock() - self._compared_at >= COMPARE_EVERY:
            self._compared_at = self._clock()
            self._shares.compare()
        keys = {*self._objects, *self._known().pools, *(self.states.keys() - self._settled)}
        try:
            keys |= self._shares.pools()
            self._reports.say("shares", "")
        except ApiError as error:
            self._reports.say("shares", f"{error} (tried again)")
        return keys

    # --- one pool ----------------------------------------------------------------------------

    def _follow(self, key: str) -> FollowedPool:
        old = self._known().pools.get(key)
        new = self._view(key, old)
        entry = allotted(new) if new is not None else ()
        usable = common(entry, _runs(old.usable)) if old is not None else ()
        beside = self._beside(key, old, entry) if new is not None else ()
        now = new and replace(new, usable=listed(usable), beside=beside)
        self._write(key, now)
        # From here on no ADD begins with what was lost; those before have their reservations.
        asked = _runs(beside)
        held = self._held(key)
        outside = without(held, (*entry, *asked))
        share = self._shares.own(key)
        wanted = merged((*entry, *held, *asked))
        is_wider = bool(without(wanted, intervals(share) if share is not None else ()))
        self._shares.write(key, wanted)
        others: Sequence[OtherShare] = ()
        blocked: tuple[Interval, ...] = ()
        if now is not None and (is_wider or key not in self._settled or usable != merged(entry)):
            others = self._shares.others(key)
            foreign = [run for other in others for run in other.intervals]
            usable, blocked = without(entry, foreign), common(entry, merged(foreign))
            self._write(key, replace(now, usable=listed(usable)))
        self._reports.tell(
            key, self._objects.get(key), self._holders(key, outside), blocked, others
        )
        return FollowedPool(size(entry), size(usable), size(blocked), size(outside), len(beside))

    def _view(self, key: str, old: NodePool | None) -> NodePool | None:
        """The node's part as the pool says it; None of a pool that is gone."""
        pool = self._objects.get(key)
        if pool is None:
            return None
        try:
            view = node_pool(pool, self._node)
        except Invalid as error:
            self._reports.say(f"{key}: spec", f"nv-ipam's pool {key} cannot be used: {error}")
            return old and replace(old, first="", last="", excluded=())
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

    def _known(self) -> NodePools:
        try:
            return self._file.read() or NodePools()
        except CNIError as error:
            if error.code != Code.STORE_DAMAGED:
                raise
            return NodePools()  # it is written again, with what the API server says

    def _write(self, key: str, pool: NodePool | None) -> None:
        """Change one pool in the file."""
        known = self._known()
        pools = {name: each for name, each in known.pools.items() if name != key}
        if pool is not None:
            pools[key] = pool
        new = NodePools(node=self._node, pools=pools)
        if new != known:
            self._file.write(new)

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
        pool, old = self._objects.get(key), self._known().pools.get(key)
        if pool is None or old is None or key not in self._settled:
            raise _not_now(key, address, "this node has not read the pool yet")
        entry = entry_with(pool, address)
        if entry is not None and entry.node != self._node and text(address) != old.gateway:
            raise taken(old, address, f"node {entry.node}, whose entry has it")
        self._wake.set()  # the share is mended if anything fails
        try:
            share = self._shares.own(key)
            self._shares.write(key, (*(intervals(share) if share else ()), *one))
            for other in self._shares.others(key):
                if common(other.intervals, one):
                    self._settled.discard(key)
                    raise taken(old, address, f"node {other.node}")
            self._asked[key, address] = self._clock()
            self._write(key, replace(old, beside=tuple({*old.beside, text(address)})))
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
