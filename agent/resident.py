"""The agent from its start to SIGTERM.

It reads settings, sets up the log and makes the plugins. Then it waits for its turn: a lock makes
it the only agent of the node that listens. It makes the socket and reports that it is ready. Sweeps
run beside the calls, each attachment under its own lock.

An agent that leaves its node attaches no pod, and ends its service when the node is empty.

At SIGTERM it closes its sockets, gives the lock to the next agent, which may have been waiting for
it, and finishes its running calls. So two agents may be at work for a while, in calls for different
attachments.
"""

import gc
import logging
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from types import FrameType

from agent import leasing, leave_node, settings, state_file, systemd
from agent.gpu_limits import AgentGpuLimits
from agent.leave_node import STANDING_BY, Departure, Leaving
from agent.observe import logs, metrics
from agent.observe.http import Endpoint
from agent.observe.metrics import Lasting, Metrics
from agent.observe.node_events import AgentEvents
from agent.policies import AgentPolicies
from agent.serve.calls import Calls, Loader
from agent.serve.launcher_server import BACKLOG, OVERTIME, Server
from agent.serve.workers import Workers
from agent.settings import UNIX, Loaded, Settings
from agent.sweeper import Sweeper
from base import locks, loop, msgspec_warmup, unix_socket
from base.paths import Paths
from base.watching import WatchedFile
from cni.attachments import node_facts, pod_choices
from cni.attachments.journal import Journal
from cni.attachments.orphans import sweep_all
from cni.ipoib.plugin import IPoIB
from cni.rdma.plugin import Rdma
from cni.sriov.plugin import Sriov
from deviceplugin.pools import formats
from deviceplugin.service import Service
from host import procfs
from ipam.delegation import OURS, TAKEN_OVER
from ipam.executable import IpamExecutable
from ipam.plugin import AddressPlugin
from ipam.store.store_files import StoreFiles
from ipam.store_choice import Scope, Stores
from policy.rules import Policy

LOOK_EVERY = 1.0  # seconds, for SIGTERM while another agent serves
PAUSE = 0.02  # seconds between two attempts to get its lock

Extra = Callable[[AddressPlugin], Mapping[str, Loader]]
"""More plugins by name, which may use the node's addresses."""

Watch = Callable[[Path], WatchedFile]
"""Watches whether a directory still has podfabric's executables."""

_log = logging.getLogger(__name__)


GONE = "the node has no attachment, and podfabric's launchers and files are removed"


class Unable(Exception):
    """The agent cannot start. The text says why and what to do."""


def run(
    paths: Paths,
    extra: Extra = lambda addresses: {},
    *,
    leaving: Leaving | None = None,
    watch: Watch | None = None,
) -> int:
    """Serve until SIGTERM; the exit code. `extra` replaces or adds plugins."""
    try:
        loaded = settings.load(paths.config)
        logs.configure(loaded.settings)
        settings.log_mistakes(loaded)
        msgspec_warmup.build()
        procfs.use(paths.proc)
        # A client has two or three descriptors, and the usual limit is 1024.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        with ExitStack() as stack:
            try:
                agent = Agent(paths, loaded, extra, stack, leaving)
                has_turn = agent.wait()
            except OSError as error:
                text = f"cannot use {error.filename}: {error.strerror}: make it writable for root"
                raise Unable(text) from None
            if has_turn:
                if watch is not None:
                    stack.callback(watch(paths.cni_bin).close)
                agent.serve()
        if leaving is not None:
            leave_node.remove_directories(paths)
    except Unable as error:
        _log.error("%s", error)
        return 1
    return 0


class Agent:
    """All parts of the agent, connected. What must be closed is on `stack`."""

    def __init__(
        self,
        paths: Paths,
        loaded: Loaded,
        extra: Extra,
        stack: ExitStack,
        leaving: Leaving | None,
    ) -> None:
        self._presence = stack.enter_context(state_file.present(paths.run, "starting"))
        self._turn = stack.enter_context(ExitStack())  # with the lock of the agent that listens
        self._sockets = stack.enter_context(ExitStack())
        self._server: Server | None = None
        self._leaving = leaving
        self._departure: Departure | None = None
        self._withdrawing: threading.Thread | None = None
        self._paths = paths
        self._loaded = loaded
        self._stack = stack
        self._store = StoreFiles(
            paths.ipam, facts=partial(node_facts.look, paths), report=_log.warning
        )
        stack.callback(self._store.close)
        ipam = loaded.settings.ipam
        lessee = leasing.lessee_of(paths, self._store, ipam)

        def scope() -> Scope:
            loaded.require("ipam")
            return ipam.scope

        stores = Stores(self._store, scope, lessee)
        pools = leasing.pools_of(paths, self._store, ipam)
        # There is one of each on a node at a time.
        self._followers = [each for each in (lessee, pools) if each is not None]
        policies = self._policies = AgentPolicies(paths, self._policy)
        stack.callback(policies.close)
        self._addresses = AddressPlugin(stores, cache(paths.boot_id), policies.source)
        self._ipoib = IPoIB(paths, self._addresses, policies.source)
        self._sriov = Sriov(paths, self._addresses, policies.source)
        self._rdma = Rdma(paths)
        self._events = AgentEvents()
        stack.callback(self._events.close)
        gpu_limits = AgentGpuLimits(
            paths,
            lambda: self._devices.tenants(),
            lambda: self._devices.limited_gpus(),
            self._events,
        )
        self._devices = Service(
            paths,
            lambda: formats.load(paths.config),
            paths.config,
            pods_known=partial(pod_choices.prune, paths),
            gpu_limits=gpu_limits,
            leaving=leaving is not None,
            mistaken=self._tell_mistake,
        )
        stack.callback(self._devices.close)
        self._workers = Workers(self._settings.workers)
        self._metrics = Metrics(
            plugins=(OURS, "ipoib", "sriov", "ib-sriov", "rdma"),
            usage=self._addresses.usage,
            attachments=Journal(paths).counts,
            by_range=self._settings.listen.startswith(UNIX),  # only root can read there
        )
        self._metrics.add(
            lambda: [metrics.devices(self._devices.states(), self._devices.held())],
            lambda: [metrics.mistakes(self._mistakes())],
            gpu_limits.families,
            policies.families,
            leasing.unreadable,
        )
        if lessee is not None:
            self._metrics.add(partial(leasing.families, lessee))
            lessee.leaving = leaving is not None
        for follower in self._followers:
            stack.callback(follower.close)
        self._calls = Calls(
            {**self._plugins(), **extra(self._addresses)},
            self._metrics.observe,
            until_empty=leaving is not None,
            failed=policies.failed,
        )
        self._metrics.watch(
            running=lambda: self._workers.running,
            waiting=lambda: self._workers.waiting,
            stuck=lambda: self._workers.stuck,
            connections=lambda: self._server.connections if self._server is not None else 0,
        )
        self._state = "starting"
        self._stopping = False
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)

    def wait(self) -> bool:
        """Wait until no other agent of the node listens; False if SIGTERM comes first."""
        path = self._paths.agent_lock
        patience = 0.0
        while not self._stopping:
            try:
                lock = locks.locked(
                    path, "the agent", timeout=patience, keep=True, longest_pause=PAUSE
                )
                self._turn.enter_context(lock)
            except locks.Busy:
                if self._state == "starting":
                    self._stand_by(path)
                patience = LOOK_EVERY
            else:
                if self._leaving is None and leave_node.removal_has_begun(self._paths):
                    leave_node.remove_state(self._paths)
                locks.remove_abandoned(self._paths.locks)
                return True
        return False

    def serve(self) -> None:
        """Serve until SIGTERM or SIGINT; then finish running calls, and leave the others."""
        self._server = Server(
            self._sockets.enter_context(self._listener()),
            self._calls.call,
            self._workers,
            self._settings,
            leave=self._leave,
            refused=self._metrics.refused,
        )
        self._open_endpoint()
        for text in self._loaded.mistakes.values():
            self._tell_mistake(text)
        watched = WatchedFile(self._paths.config, self._reload)
        self._stack.callback(watched.close)
        self._policies.start()
        if self._leaving is None or leave_node.gpu_holders(self._paths):
            self._devices.start()
        for follower in self._followers:
            follower.start()
        if self._settings.sweep or self._leaving is not None:
            sweeper = Sweeper(
                lambda: sweep_all(self._addresses, self._ipoib, self._sriov), self._metrics
            )
            self._sockets.callback(sweeper.close)
        gc.freeze()  # what exists now lasts: no collection needs to look at it
        gc.enable()
        watchdog = systemd.Watchdog(lambda: self._alive()[0])
        self._stack.callback(watchdog.close)
        self._tell("serving")
        if self._stopping:  # before there was a server
            self._server.stop()
        systemd.notify("READY=1")
        _log.info("serving at %s", self._paths.agent_socket)
        if self._leaving is not None:
            self._departure = Departure(
                self._paths,
                self._leaving.quiet,
                self._store,
                self._tell,
                self._server.stop,
            )
            self._stack.callback(self._departure.close)
        self._server.serve()
        self._workers.close(0.0)
        if self._leaving is not None and self._departure is not None:
            self._departure.close()
            self._depart(self._leaving, empty=self._departure.empty)
        _log.info("stopped")

    def _plugins(self) -> dict[str, Loader]:
        ipam = IpamExecutable(self._addresses, self._paths.locks)
        return {
            "ipoib": lambda environ: self._ipoib,
            "sriov": lambda environ: self._sriov,
            "ib-sriov": lambda environ: self._sriov,
            "rdma": lambda environ: self._rdma,
            OURS: lambda environ: ipam,
            **{name: lambda environ: ipam for name in TAKEN_OVER},
        }

    @contextmanager
    def _listener(self) -> Iterator[socket.socket]:
        """The socket. Its file stays at the end: it says that there will be an agent again."""
        path = self._paths.agent_socket
        try:
            listener = unix_socket.listen(path, BACKLOG)
        except OSError as error:
            raise Unable(f"cannot listen at {path}: {error.strerror or error}") from None
        with listener:
            yield listener
            # Closing is not enough: a child that was just forked still has the descriptor.
            listener.shutdown(socket.SHUT_RDWR)

    def _open_endpoint(self) -> None:
        if not self._settings.listen:
            return
        try:
            endpoint = Endpoint(
                self._settings.listen,
                Lasting(self._metrics.exposition),
                self._alive,
                self._ready,
                removed=lambda: (self._state == GONE, self._state),
            )
        except OSError as error:
            raise Unable(
                f'cannot listen at {self._settings.listen}: {error.strerror}: set "agent.listen" '
                f"in {self._paths.config} to a free address"
            ) from None
        self._sockets.callback(endpoint.close)

    def _alive(self) -> tuple[bool, str]:
        if self._state.startswith("serving") and self._server and not self._server.lively():
            return False, "the serving thread has been stuck for 5 seconds: restart the agent"
        if not self._workers.able:
            return False, (
                f"no worker is free, {self._workers.stuck} are stuck in calls that do not end (the "
                "log names them): restart the agent"
            )
        return True, "stopping" if self._stopping else self._state

    def _ready(self) -> tuple[bool, str]:
        alive, text = self._alive()
        if not alive or text != "serving":
            return False, text
        if failing := loop.failing():
            return False, f"{failing}: see the log"
        stuck, limit = self._workers.stuck, self._workers.limit
        if 2 * stuck >= limit:
            return False, (
                f"{stuck} of {limit} workers are stuck in calls that do not end: see the log "
                "for the calls, and end what they wait for, or restart the agent"
            )
        return True, text

    @property
    def _settings(self) -> Settings:
        return self._loaded.settings

    def _policy(self) -> Policy:
        """The rules of config.yaml. CNIError 5 if they could never be read."""
        self._loaded.require("policy")
        return self._settings.policy

    def _mistakes(self) -> Mapping[str, bool]:
        """By section of config.yaml: whether a mistake keeps it from being used."""
        found = {section: section in self._loaded.mistakes for section in settings.SECTIONS}
        return {**found, "pools": self._devices.mistake is not None}

    def _tell_mistake(self, text: str) -> None:  # an event is written once
        self._events.of_node("ConfigurationError", text)

    def _reload(self) -> None:
        """Apply new settings, as far as a running agent can."""
        before = self._loaded
        self._loaded = new = settings.reload(self._paths.config, before)
        if new == before:
            return
        for text in new.mistakes.values():
            self._tell_mistake(text)
        logs.configure(new.settings)
        self._workers.limit = new.settings.workers
        if self._server is not None:
            self._server.limits = new.settings
        self._policies.start()
        if "ipam" in before.unread - new.unread:
            _log.info("ipam can be used now: stopping, so that the next agent uses it")
            self._stop()

    def _stop(self, signum: int = 0, frame: FrameType | None = None) -> None:
        self._stopping = True
        systemd.notify_stopping(self._settings.grace + 2 * OVERTIME)
        if self._server is not None:
            self._server.stop()

    def _tell(self, state: str) -> None:
        self._state = state
        self._presence.tell(state)

    def _stand_by(self, lock: Path) -> None:
        """Make ready to serve at once when the other agent ends."""
        self._tell(STANDING_BY if self._leaving is None else f"{STANDING_BY} to leave")
        text = f"another agent serves, which holds {lock}: waiting until it ends (fuser {lock})"
        systemd.notify(f"STATUS={text}")
        _log.info("%s", text)
        self._devices.prepare()

    def _leave(self) -> None:
        """Let the next agent take over. The running calls end here."""
        self._presence.tell("stopping")
        self._withdrawing = threading.Thread(target=self._devices.close, name="withdrawing")
        self._withdrawing.start()
        self._stack.callback(self._withdrawing.join)
        self._sockets.close()
        for follower in self._followers:
            follower.close()
        self._policies.close()
        if self._departure is None or not self._departure.empty:
            self._turn.close()
            _log.info("left the next calls to the next agent")

    def _depart(self, leaving: Leaving, *, empty: bool) -> None:
        """Remove launchers and files from an empty node. Then wait for SIGTERM, do nothing else."""
        self._store.close()
        if self._withdrawing is not None:
            self._withdrawing.join()
        if empty:
            leave_node.remove(self._paths, leaving.uninstall, lambda: self._stopping)
        self._turn.close()
        if self._stopping:
            return
        self._tell(GONE if empty else "another agent serves")
        if empty:
            _log.info("%s: remove this agent", GONE)
            self._open_endpoint()
        while not self._stopping:
            time.sleep(LOOK_EVERY)
