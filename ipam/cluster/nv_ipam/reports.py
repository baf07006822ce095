"""Tells people where addresses are not as nv-ipam's pools say.

By conditions of the node's share, events on the pool and on the pods, and lines of the log: each
once.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from base.text import printable
from ipam.addresses import Interval, parse
from ipam.cluster.api import ClusterApi
from ipam.cluster.events import PendingEvents, pod_of
from ipam.cluster.nv_ipam.objects import API, NvPool, entry_with
from ipam.cluster.nv_ipam.overlaps import PRIVATE
from ipam.cluster.nv_ipam.shares import OtherShare, Shares, common, size
from ipam.store import Reservation

_SHOWN = 8  # addresses, or nodes, in a message

_log = logging.getLogger(__name__)


class FollowedPool(NamedTuple):
    """Of one pool: how many addresses the entry has, how many of them may be handed out, how many
    of them other nodes use, how many pods hold outside of it, how many were asked for,
    and how many of the entry are left to older pools."""

    entry: int = 0
    usable: int = 0
    blocked: int = 0
    outside: int = 0
    beside: int = 0
    overlap: int = 0

    @property
    def is_plain(self) -> bool:
        """All is as the pool says."""
        return self.usable == self.entry and not (self.outside or self.beside)

    @property
    def is_moving(self) -> bool:
        """Pods hold what is not in the entry, or older pools have a part of it."""
        return bool(self.outside or self.beside or self.overlap)


class LeftToOlder(NamedTuple):
    """How many addresses of the entry older pools have, and which pools these are."""

    size: int
    pools: Sequence[str]


class MoveReports:
    """What the follower of one node tells."""

    def __init__(self, api: ClusterApi, shares: Shares, events: PendingEvents, node: str) -> None:
        self._api = api
        self._shares = shares
        self._events = events
        self._node = node
        self._said: dict[str, str] = {}
        self._outsides: dict[str, tuple[object, str]] = {}  # by pool: of what, and the message

    def tell(
        self,
        key: str,
        pool: NvPool | None,
        held: Sequence[Reservation],
        blocked: Sequence[Interval],
        others: Iterable[OtherShare],
        left: LeftToOlder,
    ) -> None:
        """`held` is what pods hold outside of the entry, `blocked` what of the entry is in use
        elsewhere, by the shares of `others`, `left` what of it older pools have. Raises
        ApiError."""
        lost = self._outside_now(key, pool, held) if held else ""
        nodes = sorted(each.whose for each in others if common(each.intervals, blocked))
        waiting = (
            f"{size(blocked)} of the addresses of {key} in the entry of node {self._node} are in "
            f"use on {_named(nodes)}: they are handed out when they are free"
        )
        conditions = {"Outside": lost, "Blocked": waiting if blocked else ""}
        overlap = f"{key}: Overlap"
        if left.size or self.said(overlap):  # few shares need that condition
            conditions["Overlap"] = self._overlap(key, pool, left) if left.size else ""
        self._shares.tell(key, conditions)
        for type_, message in conditions.items():
            if self.say(f"{key}: {type_}", message) and message:
                self._api.report(f"Addresses{type_}", message, _reference(pool, self._node))
        for each in held:
            self._events.of_pod("AddressOutsideOfEntry", lost, pod_of(each))

    def _overlap(self, key: str, pool: NvPool | None, left: LeftToOlder) -> str:
        annotated = ""
        if pool is not None:
            # whereabouts has a kind of that name, too
            meta, kind = pool.metadata, f"{pool.KIND.lower()}.{API.partition('/')[0]}"
            annotated = f"-n {meta.namespace} annotate {kind} {meta.name} {PRIVATE}=true"
        return (
            f"{left.size} of the addresses of {key} in the entry of node {self._node} are also of "
            f"{_named(left.pools)}, which is older: no new pod gets them by {key}. Give one pool "
            f"another range; or, if their networks are apart: kubectl {annotated}"
        )

    def say(self, what: str, message: str) -> bool:
        """Log it once, and its end once ("" is the end); whether it is new."""
        if self._said.get(what, "") == message:
            return False
        self._said[what] = message
        if message:
            _log.warning("nv-ipam: %s", printable(message))
        else:
            _log.info("nv-ipam: %s: over", what)
        return True

    def said(self, what: str) -> str:
        """What was logged of that last; "" if it is over."""
        return self._said.get(what, "")

    def _outside_now(self, key: str, pool: NvPool | None, held: Sequence[Reservation]) -> str:
        """`_outside`, which looks at all entries of the pool, of what has changed only."""
        version = (pool.metadata.uid, pool.metadata.resource_version) if pool else ("", "")
        what = (version, tuple(each.address for each in held))
        last, message = self._outsides.get(key, (None, ""))
        if last != what:
            message = self._outside(key, pool, held)
            self._outsides[key] = (what, message)
        return message

    def _outside(self, key: str, pool: NvPool | None, held: Sequence[Reservation]) -> str:
        entries = [entry_with(pool, parse(each.address)) for each in held] if pool else []
        now_of = sorted({f"node {each.node}" for each in entries if each is not None})
        given = (
            f"they are in the entry of {_named(now_of)}, where they are not handed out yet"
            if now_of
            else "they are in no node's entry"
        )
        addresses = ", ".join(each.address for each in held[:_SHOWN])
        return (
            f"pods of node {self._node} hold {len(held)} addresses of {key} that are not in its "
            f"entry ({addresses}): {given}; no other pod gets them. Delete the pods to end this"
        )


def _named(nodes: Sequence[str]) -> str:
    if len(nodes) <= _SHOWN:
        return ", ".join(nodes)
    return f"{len(nodes)} nodes ({', '.join(nodes[:_SHOWN])}, ...)"


def _reference(pool: NvPool | None, node: str) -> dict[str, str]:
    if pool is None:
        return {"apiVersion": "v1", "kind": "Node", "name": node}
    meta = pool.metadata
    names = {"namespace": meta.namespace, "name": meta.name, "uid": meta.uid}
    return {"apiVersion": API, "kind": pool.KIND, **names}
