"""Shares: what each machine uses of a pool, so that no two machines use one address.

nv-ipam's controller may give a node's entry to another while its pods run. So a machine writes down
what it may use, and *then* reads what the others wrote: of two that want one address at least one
sees the other, and whoever sees another leaves the address alone. A machine is known by the
identity of its store, as the holder of a block is: another one under the same node name has shares
of its own.
"""

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from typing import NamedTuple

from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam.addresses import Interval, parse_interval
from ipam.cluster.api import AlreadyExists, ClusterApi, Conflict, NotFound, Refused
from ipam.cluster.durations import seconds
from ipam.cluster.identity import same_machine_before
from ipam.cluster.objects import (
    GROUP,
    AddressShare,
    Condition,
    Holder,
    Meta,
    ReclaimSpec,
    ShareSpec,
    ShareStatus,
)
from ipam.nv_ipam.pools import listed
from ipam.ranges import merged, outside

MAX_OFFLINE = seconds(ReclaimSpec().max_offline)
"""Seconds after its last confirmation for which a share's machine gives addresses to new pods. The
controller waits for that, and longer, after it has fenced the share (`controller.reclaim`)."""

MOST_RUNS = 256  # of a share; what is more scattered is written as fewer, wider runs
JOINED = f"{GROUP}/nv-ipam-joined"
"""The annotation of a share in mode own: all that nv-ipam's daemon gave to the node's pods is in
its store, and nothing comes from its entry any more. So the share stands in place of the entry."""

HANDED_OVER = f"{GROUP}/nv-ipam-exported"
"""The annotation of a share: nv-ipam's own daemon has been given what pods hold of the pool, and
podfabric gives nothing of it here (`ipam.nv_ipam.exporting`)."""

WRITTEN_AFTER = "ipam.podfabric.io/written-after"  # an annotation: the version before this one
_LONGEST_NAME = 253
_REASONS = {"Overlap": "OlderPool"}  # of conditions

_log = logging.getLogger(__name__)


class OtherShare(NamedTuple):
    """What another machine uses of a pool, or any machine of one that overlaps it. `whose` is for
    people."""

    pool: str
    whose: str
    intervals: tuple[Interval, ...]


class Shares:
    """The shares of one machine, as they were last seen. `read` comes first, again and again."""

    def __init__(self, api: ClusterApi, node: str) -> None:
        self._api = api
        self._node = node
        self._holder: Holder | None = None
        self._revives = False
        self._own: dict[str, AddressShare] = {}
        self._unsure: set[str] = set()  # what may differ from `_own`
        self._unnamed: dict[str, AddressShare] = {}
        self._answered: set[str] = set()  # whose last write has an answer, in this process

    @property
    def is_read(self) -> bool:
        """Whether this machine is known, and which shares it had."""
        return self._holder is not None

    @property
    def unnamed(self) -> bool:
        """Whether shares of an older agent of this machine are there."""
        return bool(self._unnamed)

    def read(self, holder: Holder, *, takes_unnamed: bool) -> None:
        """Read what is under this node's name: one consistent LIST. Raises ApiError.

        A share of an older agent names no machine. It is this one's if this `takes_unnamed` ones:
        such an agent has run here. Shares of this machine before it booted, with a store that is
        lost, are deleted: its sandboxes died with the boot.
        """
        own: dict[str, AddressShare] = {}
        unnamed: dict[str, AddressShare] = {}
        for each in self._api.list(AddressShare, {"spec.node": self._node}).items:
            if each.holder.instance == holder.instance:
                own[each.spec.pool] = each
            elif not each.holder.instance:
                if takes_unnamed:
                    unnamed[each.spec.pool] = each
            elif same_machine_before(holder, each.holder):
                self._discard(each)
        self._own, self._unnamed, self._holder = own, unnamed, holder
        self._unsure.clear()
        self._revives = True

    def node_is_unseen(self) -> None:
        """The own Node object could not be seen: a share that is fenced stays so."""
        self._revives = False

    def pools(self) -> set[str]:
        """The pools of which this machine has a share, also of an earlier agent."""
        return self._own.keys() | self._unnamed.keys()

    def own(self, key: str) -> AddressShare | None:
        """This machine's share of a pool. Raises ApiError."""
        if key in self._unsure:
            try:
                self._own[key] = self._ours(self._api.get(AddressShare, self._name(key)))
            except NotFound:
                self._own.pop(key, None)
            self._unsure.discard(key)
        return self._own.get(key)

    def is_active(self, key: str) -> bool:
        """Whether this machine has a share of the pool, of this boot, that is not fenced. Raises
        ApiError."""
        share = self.own(key)
        return share is not None and (share.spec.state, share.holder) == ("Active", self._holder)

    def write(self, key: str, wanted: Iterable[Interval], *, keeps: bool = False) -> None:
        """Let others know what this machine uses: by no share if it uses nothing, but where it
        `keeps` one, to say that it has joined. Raises ApiError.

        An earlier write without an answer may take effect later, unless the version that it was
        made for is gone. So then, and after a restart, the share is written even if it is equal.
        """
        last = self.own(key)
        new = self._spec(key, listed(coarse(merged(wanted))), last)
        is_handed_over = last is not None and HANDED_OVER in last.metadata.annotations
        if last is None or last.spec != new or key not in self._answered or is_handed_over:
            self._unsure.add(key)  # it is read again, also after a failure
            self._answered.discard(key)
            if last is None:
                if new.ranges or keeps:
                    self._own[key] = self._created(key, new)
            elif new.ranges or keeps:
                # An update that changes nothing would leave the version as it is.
                notes = {**last.metadata.annotations, WRITTEN_AFTER: last.metadata.resource_version}
                notes.pop(JOINED, None)  # this node follows
                notes.pop(HANDED_OVER, None)  # and serves the pool
                meta = replace(last.metadata, annotations=notes)
                self._own[key] = self._api.update(replace(last, metadata=meta, spec=new))
            else:
                self._api.delete(last)
                del self._own[key]
            self._unsure.discard(key)
            self._answered.add(key)
        if key in self._unnamed:  # the new one has what it protects
            with suppress(NotFound):
                self._api.delete(self._unnamed[key])
            del self._unnamed[key]

    def hand_over(self, key: str) -> None:
        """Let others know that nv-ipam's own daemon serves this node. Raises ApiError."""
        share = self.own(key)
        if share is None or HANDED_OVER in share.metadata.annotations:
            return
        notes = {**share.metadata.annotations, HANDED_OVER: "true"}
        self._unsure.add(key)  # it is read again after a failure
        meta = replace(share.metadata, annotations=notes)
        self._own[key] = self._api.update(replace(share, metadata=meta))
        self._unsure.discard(key)

    def others(self, key: str, overlapping: Iterable[str] = ()) -> Sequence[OtherShare]:
        """What all other machines use of the pool now, and all machines of those that overlap it:
        one consistent LIST each. Raises ApiError."""
        return [
            each
            for pool in (key, *overlapping)
            for each in self.of_others(key, self._api.list(AddressShare, {"spec.pool": pool}).items)
        ]

    def of_others(self, key: str, shares: Iterable[AddressShare]) -> Sequence[OtherShare]:
        """What of these shares is not this machine's part of the pool. CNIError 6."""
        return [
            OtherShare(each.spec.pool, self._whose(key, each), intervals(each))
            for each in shares
            if each.spec.pool != key or not self._is_own(each)
        ]

    def _is_own(self, share: AddressShare) -> bool:
        assert self._holder is not None
        unnamed = self._unnamed.get(share.spec.pool)
        if unnamed is not None and unnamed.metadata.uid == share.metadata.uid:
            return True
        return share.holder.instance == self._holder.instance

    def tell(self, key: str, conditions: Mapping[str, str]) -> None:
        """Write conditions that are true, with their messages. Raises ApiError."""
        share = self.own(key)
        if share is None:
            return
        former = {each.type: each for each in share.status.conditions}
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        told = []
        for type_, message in conditions.items():
            status = "True" if message else "False"
            last = former.get(type_)
            same = last is not None and last.status == status
            told.append(
                Condition(
                    type=type_,
                    status=status,
                    reason=_REASONS.get(type_, "Moved") if message else "AsThePoolSays",
                    message=message,
                    last_transition_time=last.last_transition_time if last and same else now,
                    observed_generation=share.metadata.generation,
                )
            )
        compared = [(each.type, each.status, each.message) for each in told]
        if compared == [(each.type, each.status, each.message) for each in former.values()]:
            return
        if not former and not any(conditions.values()):
            return
        self._unsure.add(key)
        changed = replace(share, status=ShareStatus(conditions=tuple(told)))
        self._own[key] = self._api.update_status(changed)
        self._unsure.discard(key)

    def forget(self, key: str) -> None:
        """Read the share of that pool again before it is used."""
        self._unsure.add(key)

    def _spec(self, key: str, ranges: tuple[str, ...], last: AddressShare | None) -> ShareSpec:
        assert self._holder is not None
        return ShareSpec(
            pool=key,
            node=self._node,
            ranges=ranges,
            holder=self._holder,
            state="Active" if last is None or self._revives else last.spec.state,
            max_offline_seconds=round(MAX_OFFLINE),
        )

    def _created(self, key: str, spec: ShareSpec) -> AddressShare:
        name = self._name(key)
        try:
            return self._api.create(AddressShare(metadata=Meta(name=name), spec=spec))
        except AlreadyExists:  # an earlier attempt's, whose answer was lost
            last = self._ours(self._api.get(AddressShare, name))
            return self._api.update(replace(last, spec=spec))

    def _name(self, key: str) -> str:
        assert self._holder is not None
        return share_name(key, self._node, self._holder.instance)

    def _ours(self, found: AddressShare) -> AddressShare:
        assert self._holder is not None
        if found.holder.instance != self._holder.instance:
            name, other = found.metadata.name, found.holder
            raise AlreadyExists(f"{name} is of another machine: {other.instance} on {other.node}")
        return found

    def _discard(self, share: AddressShare) -> None:
        """Delete a share that protects nothing, if that can be done now."""
        try:
            self._api.delete(share)
        except (NotFound, Conflict, Refused) as error:
            _log.info("nv-ipam: share %s: left: %s", share.metadata.name, error)
        else:
            _log.info("nv-ipam: share %s: deleted: it is over", share.metadata.name)

    def _whose(self, key: str, share: AddressShare) -> str:
        if share.spec.pool != key:
            return f"node {share.spec.node} by {share.spec.pool}"
        name, mine, other = share.metadata.name, self._holder, share.holder
        if share.spec.node != self._node:
            return f"node {share.spec.node}"
        if mine and (mine.boot, mine.machine_id) == (other.boot, other.machine_id):
            return (
                f"this machine, by a store that is lost (AddressShare {name}: it goes when the "
                "machine boots)"
            )
        return (
            f"another machine that was node {self._node} (AddressShare {name}: delete it if that "
            "machine is off for good)"
        )


def share_name(key: str, node: str, instance: str) -> str:
    """`<kind>.<pool>.<node>-<hash>`: the hash keeps machines of one name apart, and names in which
    a dot may belong to the pool or to the node."""
    digest = hashlib.sha256(f"{key} {node} {instance}".encode()).hexdigest()[:16]
    name = f"{key.replace('/', '.')}.{node}"
    return f"{name[: _LONGEST_NAME - 17].rstrip('.-')}-{digest}"


def intervals(share: AddressShare) -> tuple[Interval, ...]:
    """The addresses of a share. CNIError 6."""
    try:
        return _parsed(share.spec.ranges)
    except ValueError as error:
        raise CNIError(
            Code.DECODING_FAILURE,
            f"AddressShare {share.metadata.name} of node {share.spec.node}: {error}: delete it; "
            "the node writes it again",
        ) from None


@lru_cache(4096)
def _parsed(ranges: tuple[str, ...]) -> tuple[Interval, ...]:
    """Of many shares few change between two looks at them."""
    return merged(map(parse_interval, ranges))


def coarse(runs: Sequence[Interval], most: int = MOST_RUNS) -> tuple[Interval, ...]:
    """The same addresses and more, in at most that many runs: the narrowest gaps are closed."""
    excess = len(runs) - most
    if excess <= 0:
        return tuple(runs)
    gaps = sorted(range(1, len(runs)), key=lambda at: runs[at].first - runs[at - 1].last)
    closed = set(gaps[:excess])
    result = [runs[0]]
    for at in range(1, len(runs)):
        if at in closed:
            result[-1] = Interval(result[-1].first, runs[at].last)
        else:
            result.append(runs[at])
    return tuple(result)


def without(runs: Iterable[Interval], taken: Iterable[Interval]) -> tuple[Interval, ...]:
    """What of the runs is in none of the taken ones."""
    holes = merged(taken)
    return merged(part for run in runs for part in outside(run, holes))


def common(runs: Iterable[Interval], others: Sequence[Interval]) -> tuple[Interval, ...]:
    """What is in both."""
    return merged(
        Interval(max(run.first, other.first), min(run.last, other.last))
        for run in runs
        for other in others
        if run.first <= other.last and other.first <= run.last
    )


def size(runs: Iterable[Interval]) -> int:
    """How many addresses there are in runs that do not overlap."""
    return sum(run.last - run.first + 1 for run in runs)
