"""How nodes share what is leased already: the lessee's part in asking, ceding and taking back."""

import threading
from collections.abc import Callable, Sequence
from functools import partial

from ipam.cluster.api import ClusterApi
from ipam.cluster.block_store import BlockStore
from ipam.cluster.borrowing import Borrowing
from ipam.cluster.ceding import Ceding
from ipam.cluster.claims import Claimant, NoneLeft
from ipam.cluster.objects import AddressBlock, Holder
from ipam.cluster.own_blocks import OwnBlocks
from ipam.cluster.pools import Pools
from ipam.cluster.upkeep import Guarded, Upkeep
from ipam.cluster.wants import Want


class Sharing:
    """One thread at a time uses it, but for `notice`. `wake` is called when there is news.

    `objects` are the lessee's blocks as they were last seen. `clock` is CLOCK_BOOTTIME.
    """

    def __init__(
        self,
        api: ClusterApi,
        store: BlockStore,
        pools: Pools,
        objects: dict[str, AddressBlock],
        boot: str,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self._api = api
        self._pools = pools
        self._objects = objects
        self._wake = wake
        self.ceding = Ceding(api, store, pools, objects, boot, clock)
        self._borrowing = Borrowing(api, store, self.ceding, clock)
        self._lock = threading.Lock()
        self._noticed: set[str] = set()
        self._has_news = False
        self._follows = False
        self._watch: OwnBlocks | None = None

    def notice(self, name: str) -> None:
        """Others want addresses of this block. For any thread."""
        with self._lock:
            self._noticed.add(name)
            self._has_news = True
        self._wake()

    @property
    def has_news(self) -> bool:
        """Whether `answer` has something to do that it has not tried yet."""
        return self._has_news

    def confirmed(self, holder: Holder, *, follow: bool) -> None:
        """The blocks were read. `follow` those of pools that cede, in a thread of its own."""
        self._borrowing.holder = holder
        self._follows = follow
        with self._lock:
            self._noticed |= {
                name for name, block in self._objects.items() if block.spec.cede_wanted
            }
        for block in self._objects.values():
            self._follow(holder.instance, block.spec.pool)

    def _follow(self, instance: str, pool: str, version: str = "") -> None:
        """Follow this node's blocks from now on, if nodes cede addresses of this pool.

        Of all other blocks a watch has no news, and would cost the API server with each claim. All
        is known up to the resource version `version`; "" if that is not known.
        """
        known = self._pools.known(pool)
        if not self._follows or known is None or not known.spec.cedes:
            return
        if self._watch is None or self._watch.instance != instance:
            self.close()
            self._watch = OwnBlocks(self._api, instance, self.notice, version)
            self._watch.start()

    def close(self) -> None:
        """Follow nothing any more."""
        if self._watch is not None:
            self._watch.close()

    def lease(
        self, claimant: Claimant, want: Want, is_late: Callable[[], bool], waiting: int
    ) -> Sequence[AddressBlock]:
        """Claim a block, or else an address that another node cedes, for so many ADDs that wait.

        As Claimant.claim, but for NoneLeft. What no ADD waits for is not asked of other nodes.
        """
        left = self._borrowing.known(want) if waiting else None
        if left is None:
            try:
                block = claimant.claim(want, is_late)
                if block is None:
                    return ()
                # The first block of a node is all that there is: many nodes lease it at once.
                known = "" if self._objects else block.metadata.resource_version
                self._follow(claimant.holder.instance, block.spec.pool, known)
                self._borrowing.served(want)
                return (block,)
            except NoneLeft as none_left:
                left = none_left
        if not waiting:
            raise left.error
        return self._borrowing.lease(want, left, waiting)

    def answer(self, upkeep: Upkeep, instance: str, guarded: Guarded) -> None:
        """Cede what others want. What fails is tried again by the next call."""
        self._has_news = False
        while self._noticed:
            with self._lock:
                name = self._noticed.pop()
            if not guarded("cede addresses", partial(self._answer, upkeep, name, instance)):
                with self._lock:
                    self._noticed.add(name)
                return

    def keep(self, upkeep: Upkeep, instance: str, guarded: Guarded) -> None:
        """Take back what no node leases, and end requests that are over."""
        guarded("take back addresses", partial(self.ceding.review, upkeep.survey, instance))
        guarded("end a request for addresses", self._borrowing.tend)

    def _answer(self, upkeep: Upkeep, name: str, instance: str) -> None:
        if self.ceding.answer(name, instance) is not None:
            # What it could not cede shows there. And a store that is put back to before this is
            # seen to lack a mark: its `seq` is lower.
            upkeep.tell_of(name)
