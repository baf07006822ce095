"""Shares: what each node uses of a pool, so that no two nodes use one address.

nv-ipam's controller may give a node's entry to another while its pods run. So a node writes down
what it may use, and *then* reads what the others wrote: of two nodes that want one address at least
one sees the other, and whoever sees another leaves the address alone.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam.addresses import Interval, parse_interval
from ipam.cluster.api import AlreadyExists, ApiError, ClusterApi, NotFound
from ipam.cluster.objects import AddressShare, Condition, Meta, ShareSpec, ShareStatus
from ipam.nv_ipam.pools import listed
from ipam.ranges import merged, outside

MOST_RUNS = 256  # of a share; what is more scattered is written as fewer, wider runs
WRITTEN_AFTER = "ipam.podfabric.io/written-after"  # an annotation: the version before this one
_LONGEST_NAME = 253


class OtherShare(NamedTuple):
    """What another node uses of a pool."""

    node: str
    intervals: tuple[Interval, ...]


class Shares:
    """The shares of one node, as they were last seen."""

    def __init__(self, api: ClusterApi, node: str) -> None:
        self._api = api
        self._node = node
        self._own: dict[str, AddressShare | None] = {}
        self._are_listed = False
        self._answered: set[str] = set()  # whose last write has an answer, in this process

    def pools(self) -> set[str]:
        """The pools of which this node has a share, also of an earlier agent. Raises ApiError."""
        if not self._are_listed:
            for each in self._api.list(AddressShare, {"spec.node": self._node}).items:
                if each.metadata.name == share_name(each.spec.pool, self._node):
                    self._own[each.spec.pool] = each
            self._are_listed = True
        return {key for key, share in self._own.items() if share is not None}

    def compare(self) -> None:
        """Read this node's shares again: somebody may have deleted one. As far as the server
        answers."""
        for key in self._own:
            try:
                self._own[key] = self._api.get(AddressShare, share_name(key, self._node))
            except NotFound:
                self._own[key] = None
            except ApiError:
                return

    def own(self, key: str) -> AddressShare | None:
        """This node's share of a pool. Raises ApiError."""
        if key not in self._own:
            try:
                self._own[key] = self._api.get(AddressShare, share_name(key, self._node))
            except NotFound:
                self._own[key] = None
        return self._own[key]

    def write(self, key: str, wanted: Iterable[Interval]) -> None:
        """Let others know what this node uses: by no share if it uses nothing. Raises ApiError.

        An earlier write without an answer may take effect later, unless the version that it was
        made for is gone. So then, and after a restart, the share is written even if it is equal.
        """
        ranges = listed(coarse(merged(wanted)))
        last = self.own(key)
        if last is not None and last.spec.ranges == ranges and key in self._answered:
            return
        self._own.pop(key, None)  # it is read again, also after a failure
        self._answered.discard(key)
        if last is None:
            if ranges:
                self._own[key] = self._created(key, ranges)
        elif ranges:
            spec = replace(last.spec, ranges=ranges)
            # An update that changes nothing would leave the version as it is.
            notes = {**last.metadata.annotations, WRITTEN_AFTER: last.metadata.resource_version}
            meta = replace(last.metadata, annotations=notes)
            self._own[key] = self._api.update(replace(last, metadata=meta, spec=spec))
        else:
            self._api.delete(last)
            self._own[key] = None
        self._answered.add(key)

    def others(self, key: str) -> Sequence[OtherShare]:
        """What all other nodes use of the pool now. Raises ApiError."""
        listing = self._api.list(AddressShare, {"spec.pool": key})
        return [
            OtherShare(each.spec.node, intervals(each))
            for each in listing.items
            if each.spec.node != self._node
        ]

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
                    reason="Moved" if message else "AsThePoolSays",
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
        self._own.pop(key, None)
        changed = replace(share, status=ShareStatus(conditions=tuple(told)))
        self._own[key] = self._api.update_status(changed)

    def forget(self, key: str) -> None:
        """Read the share of that pool again before it is used."""
        self._own.pop(key, None)

    def _created(self, key: str, ranges: tuple[str, ...]) -> AddressShare:
        name = share_name(key, self._node)
        new = AddressShare(
            metadata=Meta(name=name), spec=ShareSpec(pool=key, node=self._node, ranges=ranges)
        )
        try:
            return self._api.create(new)
        except AlreadyExists:  # of this node: an earlier attempt's, whose answer was lost
            last = self._api.get(AddressShare, name)
            return self._api.update(replace(last, spec=replace(last.spec, ranges=ranges)))


def share_name(key: str, node: str) -> str:
    """`<kind>.<pool>.<node>`; with a hash if that is too long, or if the pool's name has a dot,
    so that another pool and node could make the same name."""
    name = f"{key.replace('/', '.')}.{node}"
    if len(name) <= _LONGEST_NAME and "." not in key:
        return name
    digest = hashlib.sha256(f"{key} {node}".encode()).hexdigest()[:16]
    return f"{name[: _LONGEST_NAME - 17].rstrip('.-')}-{digest}"


def intervals(share: AddressShare) -> tuple[Interval, ...]:
    """The addresses of a share. CNIError 6."""
    try:
        return merged(parse_interval(each) for each in share.spec.ranges)
    except ValueError as error:
        raise CNIError(
            Code.DECODING_FAILURE,
            f"AddressShare {share.metadata.name} of node {share.spec.node}: {error}: delete it; "
            "the node writes it again",
        ) from None


def coarse(runs: Sequence[Interval]) -> tuple[Interval, ...]:
    """The same addresses and more, in at most MOST_RUNS runs: the narrowest gaps are closed."""
    excess = len(runs) - MOST_RUNS
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
