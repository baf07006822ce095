"""`podfabric controller`: repeats rounds while this process leads."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from base import loop
from base.problems import Problems
from ipam.controller.definitions import POOLS_PER_NAMESPACE, read
from ipam.controller.reclaim import Reclaim, ReclaimCounts
from ipam.controller.rounds import OtherPools, Rounds, Seen, World
from ipam.controller.steps import Steps
from ipam.controller.whereabouts_coexistence import Mode
from ipam.leases.objects import AddressBlock, AddressPool, AddressReservation
from kube.client import ClusterApi
from kube.informer import Mirror, NodePoll, Polled, same
from kube.leadership import RENEW_EVERY, Leadership
from kube.resources import NetworkDefinition, NotLeading, Unreadable

SETTLE = 0.3  # least seconds between two rounds. Short: a pod waits for the pool of its definition
SHARE = 4  # pause, in CPU times of the last round: rounds take at most a fifth of a CPU
ROUND_EVERY = 5.0  # most seconds between two rounds
REQUESTS_PER_SECOND = 100.0  # a node's client sends 20, but all nodes wait for this client
REQUESTS_AT_ONCE = 400  # two for each of 200 pods that start at once
STUCK_AFTER = 300.0  # seconds without a step of the loop

Others = Callable[[ClusterApi, Callable[[], None]], OtherPools]

_log = logging.getLogger(__name__)


class LiveView:
    """Mirrors our objects and polls the Nodes for one leader."""

    def __init__(
        self, api: ClusterApi, changed: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self._nodes = NodePoll(api, changed, clock)
        self._pools = Mirror(api, AddressPool, same, changed)
        self._blocks = Mirror(api, AddressBlock, same, changed)
        self._reservations = Mirror(api, AddressReservation, same, changed)
        self._definitions = Mirror(api, NetworkDefinition, read, changed, may_lack=True)

    def world(self) -> World | None:
        """Returns `None` until all objects except definitions were listed once."""
        pools, blocks = self._pools.items(), self._blocks.items()
        reservations, polled = self._reservations.items(), self._nodes.last
        if pools is None or blocks is None or reservations is None or polled is None:
            return None
        return World(
            polled=polled,
            definitions=tuple(filter(None, self._definitions.items() or ())),
            pools=pools,
            blocks=blocks,
            reservations=reservations,
        )

    def close(self) -> None:
        mirrors = (self._pools, self._blocks, self._reservations, self._definitions)
        for each in (self._nodes, *mirrors):
            each.close()


class ControllerProcess:
    """The controller from its start to `stop`.

    `leadership` has a separate client, so that many writes do not delay the renewal of the Lease.
    `other_pools(api, changed)` follows the pools of another IPAM plugin, and calls `changed` after
    each change."""

    def __init__(
        self,
        api: ClusterApi,
        leadership: Leadership,
        *,
        clock: Callable[[], float] = time.monotonic,
        pools_per_namespace: int = POOLS_PER_NAMESPACE,
        whereabouts: Mode = "None",
        other_pools: Others | None = None,
    ) -> None:
        self._other_pools = other_pools
        self._whereabouts: Mode = whereabouts
        self.leadership = leadership
        self.counts = ReclaimCounts()
        self.errors = api.errors
        self.rounds = 0
        self.seen = Seen()
        self.polled: Polled | None = None  # while this process leads
        self._pools_per_namespace = pools_per_namespace
        self._api = api
        api.may_write = self._may_write
        self._clock = clock
        self._problems = Problems(_log, clock)
        self._stopped = threading.Event()
        self._changed = threading.Event()
        self._stepped_at = {"election": clock(), "rounds": clock()}

    def run(self) -> None:
        """Take part in the election, and do rounds while this process leads, until `stop`."""
        election = loop.Loop("election", self._elect, join=None)
        election.start()
        while not self._stopped.wait(0.2):
            self._progress()
            if self.leadership.holds:
                self._lead()
        election.close()
        self.leadership.give_back()

    def stop(self) -> None:
        """End `run` after the present request."""
        self._stopped.set()
        self._changed.set()

    def now(self) -> float:
        return self._clock()

    def alive(self) -> tuple[bool, str]:
        """Whether all loops make progress, with or without an API server."""
        now = self._clock()
        stuck = [name for name, at in self._stepped_at.items() if now - at > STUCK_AFTER]
        if stuck:
            return False, f"stuck: {', '.join(stuck)}"
        failing = loop.failing()
        return not failing, failing or "alive"

    def unreadable(self) -> Sequence[Unreadable]:
        return self._api.unreadable()

    def ready(self) -> tuple[bool, str]:
        """Always ready, because a standby is ready too."""
        return True, "leads" if self.leadership.holds else "stands by"

    def _may_write(self) -> bool:
        return self.leadership.holds and not self._stopped.is_set()

    def _elect(self) -> float:
        self._stepped_at["election"] = self._clock()
        self.leadership.step()
        return RENEW_EVERY

    def _lead(self) -> None:
        """Do rounds until this process stops leading. Each leadership starts with new `Rounds`."""
        _log.info("leading")
        view = LiveView(self._api, self._changed.set, self._clock)
        others = None
        if self._other_pools is not None:
            others = self._other_pools(self._api, self._changed.set)
        rounds = Rounds(
            self._api,
            clock=self._clock,
            reclaim=Reclaim(self._api, self._clock, self.counts),
            pools_per_namespace=self._pools_per_namespace,
            steps=Steps(self._progress),
            whereabouts=self._whereabouts,
            other_pools=others,
        )
        try:
            while self._may_write():
                self._progress()
                self._changed.clear()
                began = time.thread_time()  # a wait for the API server costs no CPU
                self._round(rounds, view)
                self._stopped.wait(max(SETTLE, SHARE * (time.thread_time() - began)))
                self._changed.wait(ROUND_EVERY - SETTLE)
        finally:
            view.close()
            if others is not None:
                others.close()
            self.seen = Seen()
            self.polled = None
        _log.info("stopped leading")

    def _progress(self) -> None:
        """Record progress. A round may have many steps with slow requests."""
        self._stepped_at["rounds"] = self._clock()

    def _round(self, rounds: Rounds, view: LiveView) -> None:
        try:
            world = view.world()
            if world is None:
                return
            self.polled = world.polled
            self.seen = rounds.round(world)
            for error in (*rounds.steps.taken_errors(),) or (None,):
                self._problems.tell("a round", error)
            self.rounds += 1
            loop.worked("rounds")
        except NotLeading:
            return
        except Exception:  # noqa: BLE001 - the outermost edge: a defect must not end the rounds
            self.errors["round", "Defect"] += 1
            _log.exception("this round failed")
            loop.failed("rounds")
