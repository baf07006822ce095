"""What a node does that needs an address while other nodes have leased every block.

It makes an AddressRequest, which the controller answers with addresses that their holders cede, and
leases one of these. Without ceding the request still makes nodes give back blocks that they keep.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import msgspec

from cni.spec.errors import CNIError, Code
from ipam.addresses import Interval, parse, text
from ipam.cluster.api import AlreadyExists, ApiError, ClusterApi, Conflict, NotFound
from ipam.cluster.block_store import BlockStore
from ipam.cluster.ceding import Ceding
from ipam.cluster.claims import NoneLeft
from ipam.cluster.objects import AddressBlock, AddressRequest, Holder, Meta, RequestSpec
from ipam.cluster.pools import kept_out
from ipam.cluster.sub_blocks import SubBlocks
from ipam.cluster.wants import Want
from ipam.ranges import outside

GIVEN_UP = 60.0  # seconds without an ADD that asks: the runtime tries again within less
UNWANTED = 3.0  # the same of a request that others wait behind; an ADD that waits asks each second
_AGAIN = 60.0  # seconds until a request is made again, as the controller may have deleted it
_LOOK_AT_POOL, _LONGEST_LOOK = 1.0, 4.0  # seconds between looks for a free block, while ADDs wait
_MOST_ANSWERS = 3  # of the controller to a request that is being deleted; then a second later
_MOST_PARTS = 32
_MOST_COUNT = 64


class _Asked(msgspec.Struct):
    """A request of this node; the times are of CLOCK_BOOTTIME."""

    name: str
    left: NoneLeft
    looked: float  # when there was no free block
    wanted: float
    made: float
    pause: float = _LOOK_AT_POOL  # until the next look
    exhausted: bool = False  # nothing was to be had: it holds no offer


class Borrowing:
    """The requests of `holder`, which the lessee sets. One thread at a time uses it."""

    def __init__(
        self, api: ClusterApi, store: BlockStore, ceding: Ceding, clock: Callable[[], float]
    ) -> None:
        self._api = api
        self._store = store
        self._ceding = ceding
        self._clock = clock
        self._asked: dict[str, _Asked] = {}
        self.holder: Holder | None = None

    def known(self, want: Want) -> NoneLeft | None:
        """What a look for a free block has said a moment ago, while others are asked for one."""
        asked = self._asked.get(_key(want))
        if asked is None or self._clock() - asked.looked >= asked.pause:
            return None
        return asked.left if _is_ceding(asked.left) else None

    def lease(self, want: Want, left: NoneLeft, waiting: int) -> Sequence[AddressBlock]:
        """Lease addresses that others cede; none if this node took one back that it had ceded.

        `waiting` is how many ADDs need one. Raises CNIError: 11 as long as a holder may cede one,
        `left.error` if none can. ApiError, Unusable.
        """
        holder = self.holder
        assert holder is not None
        is_new_look = self.known(want) is not left
        asked, is_new = self._ask(holder, want, left, waiting)
        if not _is_ceding(left):
            raise left.error
        if is_new_look and self._take_back(holder, left):
            self.served(want)
            return ()
        if is_new:  # nobody has seen it yet
            raise _pending(want, asked.name)
        try:
            request = self._api.get(AddressRequest, asked.name)
        except NotFound:
            asked.made = -_AGAIN
            raise _pending(want, asked.name) from None
        asked.exhausted = request.status.exhausted
        if asked.exhausted:
            raise left.error
        leased: list[AddressBlock] = []
        for address in map(parse, request.status.offers[:waiting]):
            try:
                block = self._lease_one(holder, want, asked, address)
            except (CNIError, ApiError):
                if leased:
                    break
                raise
            if block is not None:
                leased.append(block)
        if not leased:
            raise _pending(want, asked.name)
        with suppress(ApiError):
            self._withdraw(_key(want), request)
        return leased

    def served(self, want: Want) -> None:
        """An ADD that waits has got an address of this node: others may have what is offered to it.

        What fails is left to `tend`.
        """
        with suppress(ApiError):
            self._withdraw(_key(want))

    def tend(self) -> None:
        """Delete the requests that are over. Raises ApiError."""
        now = self._clock()
        for key, asked in list(self._asked.items()):
            is_in_the_way = _is_ceding(asked.left) and not asked.exhausted
            if now - asked.wanted >= (UNWANTED if is_in_the_way else GIVEN_UP):
                self._withdraw(key)

    def _withdraw(self, key: str, request: AddressRequest | None = None) -> None:
        """Delete a request, last seen as `request`: no node is to cede more for it, and what is
        offered to it is not offered to others. `tend` repeats what fails. Raises ApiError."""
        asked = self._asked.get(key)
        if asked is None:
            return
        asked.wanted = -math.inf
        with suppress(NotFound):
            for _ in range(_MOST_ANSWERS):
                request = request or self._api.get(AddressRequest, asked.name)
                try:
                    self._api.delete(request)
                    break
                except Conflict:  # the controller has answered it meanwhile, once more
                    request = None
            else:
                return
        del self._asked[key]

    def _ask(self, holder: Holder, want: Want, left: NoneLeft, waiting: int) -> tuple[_Asked, bool]:
        """Have a request at the API server, and whether it is a new one; a failure is one of the
        ADD only if it needs it."""
        key, now, is_new = _key(want), self._clock(), False
        asked = self._asked.get(key)
        if asked is None:
            name = f"{holder.instance}.{key}"
            asked = self._asked[key] = _Asked(name, left, now, now, -_AGAIN)
        if asked.left is not left:  # each look lists the blocks: a busy API server gets fewer
            asked.left, asked.looked = left, now
            asked.pause = min(2 * asked.pause, _LONGEST_LOOK)
        asked.wanted = now
        if now - asked.made >= _AGAIN:
            spec = RequestSpec(
                pool=left.pool.metadata.name,
                node=holder.node,
                instance=holder.instance,
                count=min(max(1, waiting), _MOST_COUNT),
                address=text(left.sought.range.first) if want.fixed else "",
                parts=tuple(_parts(left)),
            )
            new = AddressRequest(metadata=Meta(name=asked.name), spec=spec)
            try:
                with suppress(AlreadyExists):
                    self._api.create(new)
                    is_new = True
                asked.made = now
            except ApiError:
                if _is_ceding(left):
                    raise
        return asked, is_new

    def _take_back(self, holder: Holder, left: NoneLeft) -> bool:
        """Take back an address that this node has ceded, and that no node leases."""
        return any(
            self._ceding.take_back(row.name, holder.instance, left.sought.parts, most=1)
            for row in self._store.blocks().values()
            if row.ceded and row.space == left.pool.status.space
        )

    def _lease_one(
        self, holder: Holder, want: Want, asked: _Asked, address: int
    ) -> AddressBlock | None:
        """Lease an address that was offered. CNIError if its block is free, or it is refused."""
        left = asked.left
        if not any(part.first <= address <= part.last for part in want.parts):
            return None
        cover = left.blocks.name(left.pool.status.space, left.blocks.index(address))
        try:
            found = self._api.get(AddressBlock, cover)
        except NotFound:
            asked.looked = -_LONGEST_LOOK  # the whole block is free
            raise _pending(want, asked.name) from None
        if text(address) in found.spec.ceded:
            subs = SubBlocks(self._api, self._store, holder, self._clock)
            block = subs.claim(left.pool, left.blocks, address, want.range.domain)
            if block is not None:
                return block
        elif text(address) in found.spec.cede_wanted:
            return None
        if want.fixed:
            raise left.error
        return None


def _is_ceding(left: NoneLeft) -> bool:
    return left.pool.spec.cedes and left.blocks.block_size > 1


def _key(want: Want) -> str:
    """What is equal of wants that one request is for."""
    return hashlib.sha256(repr((want.pool, want.parts, want.fixed)).encode()).hexdigest()[:16]


def _parts(left: NoneLeft) -> Iterable[str]:
    """What would do, as a request has it: not more than it has room for."""
    holes = kept_out(left.pool)
    parts: list[Interval] = [part for each in left.sought.parts for part in outside(each, holes)]
    for first, last in parts[:_MOST_PARTS]:
        yield text(first) if first == last else f"{text(first)}-{text(last)}"


def _pending(want: Want, name: str) -> CNIError:
    return CNIError(
        Code.TRY_AGAIN,
        f"no block of {want.range} is free, and no node has ceded an address yet (AddressRequest "
        f"{name}): nothing was reserved; the runtime tries again. See that podfabric's controller "
        "runs (kubectl -n podfabric get deploy)",
    )
