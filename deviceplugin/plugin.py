"""The device plugin of a node: it looks at the hardware, offers pools, and hands devices out.

Three threads: one looks whenever the kernel tells of a change, and every second whether a port is
as it was (no event tells of one without an interface; of the others every ten seconds); one
compares the ledger with the kubelet's own records now and then; one brings grants to disk. The
kubelet's calls come on threads of each pool's server.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

from base.paths import Paths
from deviceplugin.allocate import allocation, cdi
from deviceplugin.availability import changes, elsewhere, unfit
from deviceplugin.comparison import Comparison, PodsKnown
from deviceplugin.health import Health
from deviceplugin.inventory import Inventory
from deviceplugin.kubelet.pod_resources import PodResourcesClient
from deviceplugin.kubelet.server import PluginServer, PoolState
from deviceplugin.ledger import Ledger
from deviceplugin.pool_service import Offer
from deviceplugin.pools.config import DevicePluginConfig
from deviceplugin.pools.pool import Pool, left_out, pools, used_netdevs
from deviceplugin.startup_grace import Grace
from host.discovery import HCA
from host.errors import HostError
from host.events import Events

LOOK_EVERY = 1.0  # seconds
LOOK_AGAIN = 0.25  # seconds, while a port's change has yet to last
PORTS_EVERY = 10.0  # seconds, for every port's state and rate
COMPARE_EVERY = 60.0  # seconds
SYNC_AFTER = 0.2  # seconds: when the answer is out, and once for all the pods of a moment

_log = logging.getLogger(__name__)


class DevicePlugin:
    """Serves the pools of `config` from `start` to `close`.

    What keeps it from beginning is raised by `start`, and nothing later: OSError, HostError.
    """

    def __init__(
        self,
        paths: Paths,
        config: DevicePluginConfig,
        pods_known: PodsKnown = lambda names, uids: None,
    ) -> None:
        self._paths = paths
        self._config = config
        self._lock = threading.Lock()
        self._inventory = Inventory(paths)
        self._health = Health()
        self._ledger = Ledger(paths, paths.boot_id(), _log.warning)
        self._grace = Grace(self._ledger.keys(), time.monotonic())
        self._serving = False  # nothing is offered before the first comparison
        self._overlap = False  # some HCA is in two pools
        self._granted = False  # since the last look, of these
        self._offers: dict[str, Offer] = {}
        self._servers: dict[str, PluginServer] = {}
        self._problems: dict[str, str] = {}
        self._ended = threading.Event()
        self._stack = ExitStack()
        self._events: Events | None = None
        self._kubelet = self._stack.enter_context(PodResourcesClient(paths))
        self._comparison = Comparison(paths, self._ledger, self._kubelet, pods_known)
        self._threads = [
            threading.Thread(target=self._watch, name="devices", daemon=True),
            threading.Thread(target=self._follow_kubelet, name="kubelet", daemon=True),
            threading.Thread(target=self._follow_grants, name="checkpoint", daemon=True),
        ]

    def start(self) -> None:
        """Look, take over what the kubelet has written down, offer what is there, and go on."""
        try:
            self._events = self._stack.enter_context(Events())
        except (HostError, OSError) as error:
            _log.warning("no events of the kernel: %s: looking every second", error)
        self._look()
        try:
            self._comparison.take_over(self._offers)
        except OSError as error:
            self._tell("checkpoint", f"{self._paths.checkpoint}: {error.strerror}")
        self._grace = Grace(self._ledger.keys(), time.monotonic())
        self._serving = True
        self._look(again=False)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Withdraw every pool. What was handed out stays handed out."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._events is not None:
            self._events.wake()
        self._ledger.appended.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(10.0)
        with self._lock:
            self._withdraw(list(self._servers))
        self._stack.close()

    def reconfigure(self, config: DevicePluginConfig) -> None:
        """Other pools from now on. A pool of the same name keeps its connection."""
        with self._lock:
            if config.registration != self._config.registration:
                self._withdraw(list(self._servers))
            self._config = config
        self._look()

    def compare(self) -> None:
        """Hold the ledger against the kubelet's records now, not in a minute. Raises OSError."""
        if self._comparison.compare(self._offers, self._servers):
            self._look(again=False)
        self._ledger.settle()

    def states(self) -> list[PoolState]:
        """How each pool stands with the kubelet."""
        return [server.state() for server in list(self._servers.values())]

    def held(self) -> Mapping[str, int]:
        """How many device ids containers hold, by resource."""
        return Counter(one.resource for one in self._ledger.allocations())

    def _watch(self) -> None:
        looked = compared = time.monotonic()
        while not self._ended.is_set():
            try:
                told = self._wait(LOOK_AGAIN if self._health.pending else LOOK_EVERY)
                if self._ended.is_set():
                    return
                now = time.monotonic()
                due = now - looked >= self._config.rescan > 0
                ports = now - compared >= PORTS_EVERY
                compared = now if ports else compared
                if due or self._inventory.differs(told=told, ports=ports):
                    looked = now
                    self._look()
                elif self._health.pending or self._grace.pending or self._granted:
                    self._look(again=False)
            except Exception:  # noqa: BLE001 - the next look may find what this one could not
                _log.exception("looking at the HCAs failed")
                self._ended.wait(LOOK_EVERY)

    def _told_of_grant(self) -> None:
        """Bring the other pools up to date, before the kubelet chooses of them again."""
        if self._overlap:
            self._granted = True
            if self._events is not None:
                self._events.wake()

    def _wait(self, seconds: float) -> bool:
        """Whether the kernel told of a change; False after `seconds` without."""
        if self._events is not None:
            try:
                return self._events.wait(seconds)
            except (HostError, OSError) as error:
                _log.warning("no events of the kernel any more: %s: looking every second", error)
                self._events = None
        self._ended.wait(seconds)
        return True

    def _look(self, *, again: bool = True) -> None:
        """Bring every pool up to date with the hardware; as last seen if not `again`."""
        with self._lock:
            found = self._inventory.look() if again else self._inventory.last()
            self._granted = False  # before, for there may be another one meanwhile
            allocations = self._ledger.allocations()
            held: dict[str, set[str]] = {}
            for one in allocations:
                held.setdefault(one.resource, set()).update(device.id for device in one.devices)
            gone = self._inventory.missing(device for one in allocations for device in one.devices)
            everything, worked = [*found, *gone], self._inventory.worked
            used = used_netdevs(self._paths)
            made = pools(self._config, everything, held, worked=worked, used=used)
            offered = {hca.id for pool in made for hca in pool.hcas}
            self._overlap = len(offered) < sum(len(pool.hcas) for pool in made)
            self._health.observe(found, offered, time.monotonic())
            for name in [pool.config.resource for pool in made if not pool.hcas]:
                left = left_out(self._config, everything, held, worked=worked, used=used)
                reasons = [f"{one.hca}: {one.why}" for one in left if one.resource == name]
                self._tell(name, f"nothing is offered: {'; '.join(reasons) or 'no HCA is there'}")
            self._offer(made)
            self._describe([pool for pool in made if pool.config.cdi], found)

    def _offer(self, made: Sequence[Pool]) -> None:
        ours = frozenset(pool.config.resource for pool in made)
        self._withdraw([name for name in self._servers if name not in ours])
        try:
            self._ledger.serve(
                {pool.config.resource: [one.id for one in pool.hcas] for pool in made}
            )
        except OSError as error:
            self._tell("checkpoint", f"{self._paths.checkpoint}: {error.strerror}")
        with_rdma = [pool for pool in made if pool.config.rdma and pool.hcas]
        fabric = with_rdma[0].config.resource if with_rdma else ""
        for pool in made:
            name = pool.config.resource
            if pool.hcas:
                self._tell(name, pool.problem)
            offer = self._offers.get(name)
            if offer is None:
                offer = self._offers[name] = Offer(
                    self._paths, self._ledger, self._inventory, self._kubelet, self._told_of_grant
                )
            if self._update(offer, pool, ours, fabric=name == fabric) and name in self._servers:
                self._servers[name].changed()
        for name in [pool.config.resource for pool in made]:  # when each knows of the others
            if self._serving and name not in self._servers:
                self._serve(name, self._offers[name])

    def _update(self, offer: Offer, pool: Pool, ours: frozenset[str], *, fabric: bool) -> bool:
        """Tell an offer, and the log, which ids are fit now; whether its listing has changed."""
        name = pool.config.resource
        held = self._ledger.held(name)
        others = elsewhere(pool, self._ledger.allocations())
        now = unfit(pool, self._health.reports(), held, others)
        for ids, why in changes(pool, offer.unfit, now):
            level = logging.WARNING if why and why not in others.values() else logging.INFO
            _log.log(level, "%s: %s: %s", name, ids, why or "well")
        hoped = self._grace.hoped(pool, now, held, others, time.monotonic())
        contested = self._overlap or bool(others)
        return offer.update(pool, now, ours, fabric_env=fabric, contested=contested, hoped=hoped)

    def _tell(self, what: str, problem: str) -> None:
        """Log a problem, once while it stays the same."""
        if problem and problem != self._problems.get(what):
            _log.warning("%s: %s", what, problem)
        self._problems[what] = problem

    def _describe(self, made: Sequence[Pool], found: Sequence[HCA]) -> None:
        """The CDI files: a container that starts again gets the nodes of now."""
        problems = []
        current = {one.id: one for one in found}
        try:
            cdi.remove_others(self._paths, [pool.config for pool in made])
        except OSError as error:
            problems.append(str(error))
        for pool in made:
            try:
                allocation.describe(self._paths, pool, current)
            except cdi.Unwritten as error:  # somebody else's file, which is no other pool's matter
                problems.append(str(error))
        self._tell("CDI", "; ".join(problems))

    def _serve(self, name: str, offer: Offer) -> None:
        try:
            server = PluginServer(self._paths, offer, self._config.registration)
            server.start()
        except Exception as error:  # noqa: BLE001 - the other pools are served all the same
            self._tell(name, f"cannot be served: {error} (tried again with the next change)")
            return
        self._servers[name] = server

    def _withdraw(self, names: Iterable[str]) -> None:
        for name in names:
            self._servers.pop(name).close()
            self._offers.pop(name, None)

    def _follow_kubelet(self) -> None:
        while True:
            try:
                self.compare()
            except Exception:  # noqa: BLE001 - and so may the next comparison
                _log.exception("comparing with the kubelet failed")
            if self._ended.wait(COMPARE_EVERY):
                return

    def _follow_grants(self) -> None:
        last = False
        while not last:
            if not self._ended.is_set():
                self._ledger.appended.wait()  # or the end, which is told before this is
                self._ended.wait(SYNC_AFTER)
            last = self._ended.is_set()
            try:
                self._ledger.sync()
            except OSError as error:
                _log.error(
                    "%s: what was granted is not on disk: %s (tried again within a minute)",
                    self._paths.checkpoint,
                    error.strerror,
                )
            except Exception:  # noqa: BLE001 - and so may the next grant
                _log.exception("bringing grants to disk failed")
