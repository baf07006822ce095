"""Answers AddressRequests, and collects those that their nodes did not delete."""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from ipam.addresses import text
from ipam.cluster.api import ClusterApi, Conflict, NotFound, Refused
from ipam.cluster.controller.machines import Machines
from ipam.cluster.controller.market import Market, Offers
from ipam.cluster.controller.pool_conditions import is_exhausted, is_ready
from ipam.cluster.controller.steps import Steps
from ipam.cluster.objects import AddressBlock, AddressPool, AddressRequest, RequestStatus

KEPT = 300.0  # seconds: a node that still needs addresses asks again
TURN = 3.0  # seconds for which an offer is for one node: without an ADD that waits, it takes none

_log = logging.getLogger(__name__)


class _Turn(msgspec.Struct):
    """What a request was offered, since when, and how many offers it left untaken before."""

    offers: tuple[str, ...]
    since: float
    missed: int = 0


class Requests:
    """The memory of one leader: since when it has seen each request, and what it offered."""

    def __init__(self, api: ClusterApi, clock: Callable[[], float]) -> None:
        self._api = api
        self._clock = clock
        self._since: dict[str, float] = {}  # by uid
        self._turns: dict[str, _Turn] = {}  # by uid

    def collect(
        self,
        requests: Iterable[AddressRequest],
        pools: Mapping[str, AddressPool],
        machines: Machines,
        steps: Steps,
    ) -> Sequence[AddressRequest]:
        """Delete the requests that no node waits for; those that remain."""
        now = self._clock()
        requests = tuple(requests)
        self._since = {
            request.metadata.uid: self._since.get(request.metadata.uid, now) for request in requests
        }
        left = {request.metadata.uid: request for request in requests}

        def delete(doomed: tuple[AddressRequest, str]) -> None:
            request, why = doomed
            try:
                self._api.delete(request)
            except NotFound:
                del left[request.metadata.uid]
            except (Conflict, Refused) as error:
                _log.info("request %s: left: %s", request.metadata.name, error)
            else:
                del left[request.metadata.uid]
                _log.info("request %s: deleted: %s", request.metadata.name, why)

        doomed = [
            (request.metadata.name, (request, why))
            for request in requests
            if (why := _why(request, pools, machines, now - self._since[request.metadata.uid]))
        ]
        steps.each("requests", doomed, delete)
        return tuple(left.values())

    def answer(
        self,
        requests: Iterable[AddressRequest],
        pools: Mapping[str, AddressPool],
        market: Market,
        steps: Steps,
    ) -> None:
        """Ask holders for addresses, and then tell the nodes that need them.

        The oldest request is first, behind those that have left fewer offers untaken.
        """
        answers: list[tuple[AddressRequest, Offers]] = []
        wanted: defaultdict[str, list[int]] = defaultdict(list)
        blocks: dict[str, AddressBlock] = {}
        requests = tuple(requests)
        self._take_turns(requests)
        for request in sorted(requests, key=self._place):
            pool = pools.get(request.spec.pool)
            if pool is None or not is_ready(pool):
                continue
            try:
                offers = market.offers(request, pool)
            except ValueError as error:
                _log.info("request %s: it makes no sense: %s", request.metadata.name, error)
                continue
            answers.append((request, offers))
            for block, addresses in offers.wanted:
                blocks[block.metadata.name] = block
                wanted[block.metadata.name] += addresses
        asked: set[str] = set()

        def ask(block: AddressBlock) -> None:
            if self._ask(block, wanted[block.metadata.name]):
                asked.add(block.metadata.name)

        steps.each("asks", blocks.items(), ask)
        named = [(each[0].metadata.name, each) for each in answers]
        steps.each("answers", named, lambda each: self._tell(each[0], each[1], asked))

    def _take_turns(self, requests: Collection[AddressRequest]) -> None:
        """Count the offers that were left untaken for the time of a turn."""
        now, former = self._clock(), self._turns
        self._turns = {}
        for request in requests:
            uid, offers = request.metadata.uid, request.status.offers
            turn = self._turns[uid] = former.get(uid) or _Turn(offers, now)
            if request.status.exhausted:  # its ADDs have failed
                turn.missed = max(1, turn.missed)
            if turn.offers != offers:
                turn.offers, turn.since = offers, now
            elif offers and now - turn.since >= TURN:
                turn.missed, turn.since = turn.missed + 1, now

    def _place(self, request: AddressRequest) -> tuple[int, str, str]:
        meta = request.metadata
        return self._turns[meta.uid].missed, meta.creation_timestamp, meta.name

    def _ask(self, block: AddressBlock, addresses: Iterable[int]) -> bool:
        """Ask the holder of a block for addresses, once in a round; whether that was written."""
        wanted = (*block.spec.cede_wanted, *map(text, addresses))
        try:
            self._api.update(replace(block, spec=replace(block.spec, cede_wanted=wanted)))
        except (Conflict, NotFound, Refused) as error:
            _log.info("%s: not asked for addresses: %s", block.metadata.name, error)
            return False
        return True

    def _tell(self, request: AddressRequest, offers: Offers, asked: Collection[str]) -> None:
        offers = offers.unless_asked(asked)
        written = tuple(map(text, offers.addresses))
        status = RequestStatus(offers=written, exhausted=offers.exhausted)
        if status != request.status:
            try:
                self._api.update_status(replace(request, status=status))
            except (Conflict, NotFound, Refused) as error:
                _log.info("request %s: not answered: %s", request.metadata.name, error)


def _why(
    request: AddressRequest, pools: Mapping[str, AddressPool], machines: Machines, age: float
) -> str | None:
    """Why a request is to be deleted; None if somebody may wait for it."""
    pool = pools.get(request.spec.pool)
    if not machines.has(request.spec.node):
        return f"no node is named {request.spec.node}"
    if pool is None:
        return f"there is no pool {request.spec.pool}"
    if not request.spec.parts and pool.status.block_size and not is_exhausted(pool):
        return f"{request.spec.pool} has free blocks"
    return f"it is older than {KEPT:.0f} s" if age >= KEPT else None
