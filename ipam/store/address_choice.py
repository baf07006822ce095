"""Chooses the addresses of an attachment.

In a domain, each address is unique. Two domains may still share a link, because an option can make
a range private. So no attachment gets an address that another domain holds on the same segment.
"""

from collections.abc import Iterable, Sequence
from itertools import takewhile

from cni.spec.errors import CNIError, Code
from ipam.addresses import Interval, parse, text
from ipam.ranges import Range, RangeSet, merged, size_of, written
from ipam.store.reservations import AddressTaken, Owner, Reservation, ReservedAddress
from ipam.store.tables import Tables
from policy.allowance import NotAllowed

_DESCRIBED = 4  # ranges of a set in an error


class Chooser:
    """Chooses addresses for one owner, for use on `segment` ("" if unknown). The caller changes
    nothing in the store meanwhile. The time does not depend on the size of a range."""

    def __init__(self, tables: Tables, owner: Owner, segment: str, boot: str, since: int) -> None:
        self._tables = tables
        self._owner = owner
        self._segment = segment
        self._boot = boot
        self._since = since
        self._used: set[int] = set()
        self._behind: dict[tuple[str, str], dict[int, int]] = {}

    def choose(
        self, sets: Sequence[RangeSet], alone: Sequence[Range]
    ) -> tuple[ReservedAddress, ...]:
        """Choose one address for each set, in the same order. Raises CNIError 103, 110, 111 or 121.
        Prefers addresses of the pod's earlier sandboxes, then the lowest free addresses."""
        self._require_absent(alone)
        held = self._held_before()
        chosen: dict[int, ReservedAddress] = {}
        # Fixed sets go first, so that no other set takes their addresses.
        fixed_first = sorted(enumerate(sets), key=lambda each: not each[1].fixed)
        for index, range_set in fixed_first:
            kept = self._kept(range_set, held)
            if kept is not None:
                chosen[index] = kept
        for index, range_set in fixed_first:
            if index not in chosen:
                chosen[index] = self._free(range_set)
        reserved = tuple(chosen[index] for index in range(len(sets)))
        self._require_quota(reserved)
        return reserved

    def _held_before(self) -> list[tuple[int, Reservation]]:
        """The attachment's reservations of earlier boots, and those of the pod's earlier
        sandboxes."""
        own = self._tables.of_attachment(self._owner.attachment)
        alive = [reservation for reservation in own if reservation.boot == self._boot]
        if alive:
            held = ", ".join(reservation.address for reservation in alive)
            raise CNIError(
                Code.ALREADY_ATTACHED,
                f"{alive[0].holder} already holds {held}: nothing was changed; run DEL for this "
                "attachment before another ADD",
            )
        earlier = dict.fromkeys([*own, *self._tables.of_pod(self._owner)])
        return [(parse(reservation.address), reservation) for reservation in earlier]

    def _kept(
        self, range_set: RangeSet, held_before: Sequence[tuple[int, Reservation]]
    ) -> ReservedAddress | None:
        """An earlier address that the set still allows, if possible from the same range."""
        for same_range in (True, False):
            for range_ in range_set.ranges if held_before else ():
                network = str(range_.network)
                for address, held in held_before:
                    if (
                        held.domain == range_.domain
                        and (held.range == network) is same_range
                        and address not in self._used
                        and range_.allows(address)
                        and all(each.boot != self._boot for each in self._others(range_, address))
                    ):
                        return self._reserved(range_, address, held)
        return None

    def _free(self, range_set: RangeSet) -> ReservedAddress:
        """The lowest address that the set allows and nobody holds."""
        for range_ in range_set.ranges:
            for part in range_.parts:
                address = self._next_free(range_, part.first, part.last)
                while address in self._used:
                    address = self._next_free(range_, address + 1, part.last)
                if address <= part.last:
                    return self._reserved(range_, address)
        if range_set.fixed:
            raise self._taken(range_set.ranges[0])
        raise CNIError(
            Code.NO_FREE_ADDRESS,
            "no free address in "
            + _descriptions(self._tables, range_set.ranges)
            + ": delete pods that need no address any more, or widen the range",
        )

    def _next_free(self, range_: Range, address: int, last: int) -> int:
        """The lowest address, from `address` on, that no domain holds. Returns an address above
        `last` if all are held. A definition may repeat a range hundreds of times. So a search skips
        addresses that an earlier search of the network has passed."""
        behind_each = self._behind.setdefault((range_.domain, str(range_.network)), {})
        passed: list[int] = []
        while address <= last:
            behind = behind_each.get(address)
            if behind is None:
                passed.append(address)
                if (run := self._tables.run_at(range_.domain, address)) is not None:
                    behind = run.last + 1
                else:
                    held = self._held_by_others(range_, address)
                    passed += held
                    behind = held.stop
            if behind == address:
                break
            address = behind
        behind_each.update(dict.fromkeys(passed, address))
        return address

    def _held_by_others(self, range_: Range, first: int) -> range:
        """The unbroken run of addresses that begins at `first` and that other domains hold on this
        link. A network with the same range and the opposite `enable_overlapping_ranges` counts too,
        even if the link is unknown. whereabouts keeps one pool for both networks."""
        domain, cidr = range_.domain, str(range_.network)
        on_segment = self._tables.on_segment(self._segment, first)
        beside = self._tables.in_domain(range_.domain_beside, first)
        return _unbroken(first, ((held, other != domain) for held, other in on_segment)) or (
            _unbroken(first, ((held, network == cidr) for held, network in beside))
        )

    def _others(self, range_: Range, address: int) -> list[Reservation]:
        """The reservations of the address in other domains on this link."""
        rows = self._tables.on_segment(self._segment, address)
        here = takewhile(lambda row: row[0] == address, rows)
        held = [self._tables.at(domain, address) for _, domain in here if domain != range_.domain]
        beside = self._tables.at(range_.domain_beside, address)
        if beside is not None and beside.range == str(range_.network):
            held.append(beside)
        return [each for each in held if each is not None]

    def _reserved(
        self, range_: Range, address: int, replaced: Reservation | None = None
    ) -> ReservedAddress:
        self._used.add(address)
        owner = self._owner
        reservation = Reservation(
            domain=range_.domain,
            address=text(address),
            range=str(range_.network),
            network=owner.attachment.network,
            container_id=owner.attachment.container_id,
            ifname=owner.attachment.ifname,
            namespace=owner.pod.namespace,
            pod=owner.pod.name,
            uid=owner.pod.uid,
            boot=self._boot,
            since=self._since,
            segment=self._segment,
        )
        return ReservedAddress(range_, reservation, replaced)

    def _taken(self, range_: Range) -> AddressTaken:
        address = text(range_.first)
        if range_.first in self._used:
            return AddressTaken(f"{range_.where}: {address} is requested twice: request it once")
        own = self._tables.at(range_.domain, range_.first)
        holder = own or next(iter(self._others(range_, range_.first)), None)
        return AddressTaken(
            f"{range_.where}: address {address} is in use by another attachment: nothing was "
            "reserved; ask for another address",
            f"{address} is held by {holder.holder}" if holder else "",
        )

    def _require_absent(self, ranges: Sequence[Range]) -> None:
        """Raise CNIError 121 if another network holds an address of these ranges on the segment."""
        network = self._owner.attachment.network
        for domain in dict.fromkeys(range_.domain for range_ in ranges):
            own = [range_ for range_ in ranges if range_.domain == domain]
            for interval in merged(Interval(range_.first, range_.last) for range_ in own):
                if self._tables.is_used(domain, interval, self._segment, network):
                    first = next(each for each in own if each.first == interval.first)
                    raise CNIError(
                        Code.NOT_ALLOWED,
                        f"{first.why_private} lets this network ignore other users of {first}, but "
                        f"a network on the same link ({self._segment}) uses these addresses: "
                        "remove the option, or ask the administrator for a FabricPolicy rule "
                        'for this namespace with "set.private_ranges": [true]',
                    )

    def _require_quota(self, reserved: Sequence[ReservedAddress]) -> None:
        """Raise NotAllowed if the pod or its namespace would have too many addresses. An address
        that replaces one of an earlier sandbox does not count twice."""
        quota, pod = self._owner.quota, self._owner.pod
        if quota is None or not pod.name:
            return
        replaced = sum(
            each.replaced is not None and each.replaced.boot == self._boot for each in reserved
        )
        of_namespace = self._tables.count_of_namespace(pod.namespace, self._boot)
        of_pod = sum(each.boot == self._boot for each in self._tables.of_whole_pod(pod))
        for key, most, held, who in (
            (
                "addressesPerNamespace",
                quota.of_namespace,
                of_namespace,
                "the pods of this namespace",
            ),
            ("addressesPerPod", quota.of_pod, of_pod, "the interfaces of this pod"),
        ):
            total = held - replaced + len(reserved)
            if most is not None and total > most:
                raise NotAllowed(
                    f'"{key}": {who} have {held - replaced} addresses on this node, this '
                    f"attachment requests {len(reserved)}, and the rules "
                    f"({', '.join(quota.rules[:8])}) allow {most}: use fewer networks or pods, or "
                    "ask the administrator for a higher limit",
                    key,
                    str(total),
                    quota.rules,
                )


def held_in(tables: Tables, range_: Range) -> int:
    """The number of held addresses that the range allows."""
    if not range_.parts:
        return 0
    whole = Interval(range_.parts[0].first, range_.parts[-1].last)
    return sum(size_of(range_.within(run)) for run in tables.runs_in(range_.domain, whole))


def exhaustion(tables: Tables, sets: Iterable[RangeSet]) -> str | None:
    """Describes the first set without an address for a new owner, or returns `None`."""
    for range_set in sets:
        runs = (
            (part, tables.run_at(range_.domain, part.first))
            for range_ in range_set.ranges
            for part in range_.parts
        )
        # Touching runs are merged: the address after a run is free.
        if not range_set.fixed and all(run and run.last >= part.last for part, run in runs):
            return _descriptions(tables, range_set.ranges)
    return None


def _unbroken(first: int, held: Iterable[tuple[int, bool]]) -> range:
    """The run of addresses, from `first` on, that `held` pairs with True. `held` is sorted."""
    behind = first
    for address, counts in held:
        if address > behind:
            break
        if counts:
            behind = address + 1
    return range(first, behind)


def _descriptions(tables: Tables, ranges: Sequence[Range]) -> str:
    """Describes only a few ranges, because a count takes time under the lock."""
    held: dict[tuple[str, tuple[Interval, ...]], int] = {}
    texts = []
    for range_ in ranges[:_DESCRIBED]:
        key = (range_.domain, range_.parts)
        if key not in held:
            held[key] = held_in(tables, range_)
        excluded = ", ".join(written(range_.excluded))
        without = f" without {excluded}" if excluded else ""
        texts.append(f'"{range_.where}": {range_}{without}, of which {held[key]} are held')
    more = len(ranges) - _DESCRIBED
    if more > 0:
        texts.append(f"and {more} more range{'s' if more > 1 else ''}")
    return "; ".join(texts)
