"""Tells people where addresses are not as nv-ipam's pools say.

By conditions of the node's share, events on the pool and on the pods, and lines of the log: each
once.
"""

import logging
from collections.abc import Iterable, Sequence

from base.text import printable
from ipam.addresses import Interval, parse
from ipam.cluster.api import ClusterApi
from ipam.cluster.events import PendingEvents, pod_of
from ipam.cluster.nv_ipam.objects import API, NvPool, entry_with
from ipam.cluster.nv_ipam.shares import OtherShare, Shares, common, size
from ipam.store import Reservation

_SHOWN = 8  # addresses, or nodes, in a message

_log = logging.getLogger(__name__)


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
    ) -> None:
        """`held` is what pods hold outside of the entry, `blocked` what of the entry is in use
        elsewhere, by the shares of `others`. Raises ApiError."""
        lost = self._outside_now(key, pool, held) if held else ""
        nodes = sorted(each.whose for each in others if common(each.intervals, blocked))
        waiting = (
            f"{size(blocked)} of the addresses of {key} in the entry of node {self._node} are in "
            f"use on {_named(nodes)}: they are handed out when they are free"
        )
        conditions = {"Outside": lost, "Blocked": waiting if blocked else ""}
        self._shares.tell(key, conditions)
        for type_, message in conditions.items():
            if self.say(f"{key}: {type_}", message) and message:
                self._api.report(f"Addresses{type_}", message, _reference(pool, self._node))
        for each in held:
            self._events.of_pod("AddressOutsideOfEntry", lost, pod_of(each))

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
