"""Runs the agent from its start to SIGTERM.

Only one agent of a node listens, the one that holds the agent's lock. At SIGTERM the agent closes
its sockets, releases the lock for the next agent, and finishes its running calls. Meanwhile both
agents run calls, for different attachments.
"""

import gc
import logging
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric

from agent import leasing, leave_node, presence, settings
from agent.gpu_limits import AgentGpuLimits
from agent.leave_node import GONE, STANDING_BY, Departure, Leaving
from agent.node_report import NodeReport
from agent.observe import logs, metrics
from agent.observe.http import Endpoint
from agent.observe.metrics import Lasting, Metrics
from agent.observe.node_events import AgentEvents
from agent.policies import AgentPolicies
from agent.serve.calls import Calls, Loader
from agent.serve.launcher_server import BACKLOG, OVERTIME, Server
from agent.serve.workers import Workers
from agent.settings import PARTS, UNIX, Loaded, Settings
from base import decoding, locks, loop, unix_socket
from base.paths import Paths
from base.watching import WatchedFile
from cni import interfaces
from cni.attachments import node_facts, pod_choices
from cni.attachments.journal import Journal
from cni.attachments.orphans import Sweeper, sweep_all
from cni.rdma.plugin import Rdma
from deviceplugin.pools import formats
from deviceplugin.service import Service
from host import procfs
from ipam.delegation import OURS, TAKEN_OVER
from ipam.plugin import AddressPlugin, IpamExecutable
from ipam.store.store_files import StoreFiles
from ipam.store_choice import Scope, Stores
from policy.rules import Policy

if TYPE_CHECKING:
    from ipam.leases.lessee import Lessee

Extra = Callable[[AddressPlugin], Mapping[str, Loader]]
"""Returns additional plugins by name. They may use the node's addresses."""

_log = logging.getLogger(__name__)


class Unable(Exception):
    """The agent cannot start. The text has the reason and the remedy."""


def run(
    paths: Paths,
    extra: Extra = lambda addresses: {},
    *,
    leaving: Leaving | None = None,
    watch: Callable[[Path], WatchedFile] | None = None,
) -> int:
    """Serve until SIGTERM. Returns the exit code.

    The plugins of `extra` may replace plugins of the same name. `watch` starts a watcher that
    checks whether a directory still has podfabric's executables.
    """
    try:
        loaded = settings.load(paths.config)
        logs.configure(loaded.settings)
        settings.log_mistakes(loaded)
        decoding.build_decoders()
        procfs.use(paths.proc)
        # Each launcher needs two or three descriptors, and the usual limit is 1024.
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
    """The agent's parts, connected to each other. Closing `stack` closes the parts."""

    def __init__(
        self, paths: Paths, loaded: Loaded, extra: Extra, stack: ExitStack, leaving: Leaving | None
    ) -> None:
        self._publish = stack.enter_context(presence.present(paths.run, "starting"))
        self._turn = stack.enter_context(ExitStack())  # has the lock of the agent that listens
        self._sockets = stack.enter_context(ExitStack())
        self._server: Server | None = None
        self._leaving = leaving
        self._departure: Departure | None = None
        self._withdrawing: threading.Thread | None = None
        self._paths = paths
        self._loaded = loaded
        self._stack = stack
        self._state = "starting"
        self._stopping = False
        events = self._events = AgentEvents()
        self._tell_mistake = partial(events.of_node, "ConfigurationError")
        stack.callback(events.close)
        self._report = NodeReport(paths, self._mistakes, events.of_pod, tell_node=events.of_node)
        self._policies = AgentPolicies(paths, self._policy)
        stack.callback(self._policies.close)
        lessee = self._make_addresses()
        source = self._policies.source
        self._interfaces = interfaces.by_executable(paths, self._addresses, source)
        ipam, rdma = IpamExecutable(self._addresses, paths.locks), Rdma(paths)
        gpu_limits = self._make_devices()
        self._workers = Workers(self._settings.workers)
        self._make_metrics(gpu_limits, lessee)
        self._calls = Calls(
            {
                **interfaces.loaders(self._interfaces),
                "rdma": lambda environ: rdma,
                **dict.fromkeys((OURS, *TAKEN_OVER), lambda environ: ipam),
                **extra(self._addresses),
            },
            self._metrics.observe,
            until_empty=leaving is not None,
            failed=(self._policies.failed, self._report.refused),
        )
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)

    def _make_addresses(self) -> "Lessee | None":
        paths, ipam, warn = self._paths, self._settings.ipam, _log.warning
        self._store = StoreFiles(paths.ipam, facts=partial(node_facts.look, paths), report=warn)
        self._stack.callback(self._store.close)
        lessee = leasing.lessee_of(paths, self._store, ipam)
        pools = leasing.pools_of(paths, self._store, ipam)
        # A node has at most one lessee and one follower of nv-ipam's pools.
        self._followers = [one for one in (lessee, pools) if one is not None]
        for follower in self._followers:
            self._stack.callback(follower.close)
        if lessee is not None:
            lessee.leaving = self._leaving is not None

        def scope() -> Scope:
            self._loaded.require("ipam")
            return ipam.scope

        stores = Stores(self._store, scope, lessee)
        self._addresses = AddressPlugin(stores, cache(paths.boot_id), self._policies.source)
        return lessee

    def _make_devices(self) -> AgentGpuLimits:
        gpu_limits = AgentGpuLimits(
            self._paths,
            lambda: self._devices.plugin.tenants() if self._devices.plugin else (),
            lambda: self._devices.plugin.limited_gpus() if self._devices.plugin else (),
            self._events,
        )
        self._devices = Service(
            self._paths,
            lambda: formats.load(self._paths.config),
            self._paths.config,
            pods_known=partial(pod_choices.prune, self._paths),
            gpu_limits=gpu_limits,
            leaving=self._leaving is not None,
            mistaken=self._tell_mistake,
        )
        self._stack.callback(self._devices.close)
        return gpu_limits

    def _make_metrics(self, gpu_limits: AgentGpuLimits, lessee: "Lessee | None") -> None:
        self._metrics = Metrics(
            plugins=(OURS, *self._interfaces, "rdma"),
            usage=self._addresses.usage,
            attachments=Journal(self._paths).counts,
            by_range=self._settings.listen.startswith(UNIX),  # only root can open a unix socket
        )
        self._metrics.add(
            self._device_metrics,
            lambda: [metrics.mistakes({part: part in self._mistakes() for part in PARTS})],
            gpu_limits.families,
            self._policies.families,
            leasing.unreadable,
            self._report.families,
        )
        if lessee is not None:
            self._metrics.add(partial(leasing.families, lessee))
        self._metrics.watch(
            self._workers, lambda: self._server.connections if self._server is not None else 0
        )

    def _device_metrics(self) -> Iterable[Metric]:
        plugin = self._devices.plugin
        return [metrics.devices(plugin.states(), plugin.held())] if plugin else []

    def wait(self) -> bool:
        """Wait until no other agent of the node listens. Returns False if SIGTERM comes earlier."""
        lock = self._paths.agent_lock
        if not presence.has_turn(lock, self._turn, self._stand_by, lambda: self._stopping):
            return False
        if self._leaving is None and leave_node.removal_has_begun(self._paths):
            leave_node.remove_state(self._paths)
        locks.remove_abandoned(self._paths.locks)
        return True

    def serve(self) -> None:
        """Serve until SIGTERM or SIGINT. Then finish running calls and refuse waiting calls."""
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
        self._stack.callback(WatchedFile(self._paths.config, self._reload).close)
        self._policies.start()
        if self._leaving is None or leave_node.gpu_holders(self._paths):
            self._devices.start()
        for follower in self._followers:
            follower.start()
        if self._leaving is None:
            self._report.start()
            self._sockets.callback(self._report.close)
        if self._settings.sweep or self._leaving is not None:
            sweeper = Sweeper(
                lambda: sweep_all(self._addresses, *dict.fromkeys(self._interfaces.values())),
                self._metrics.swept,
            )
            self._sockets.callback(sweeper.close)
        gc.freeze()  # these objects exist as long as the agent: no collection needs to visit them
        gc.enable()
        self._stack.callback(presence.Watchdog(lambda: self._alive()[0]).close)
        self._tell("serving")
        if self._stopping:  # SIGTERM came before there was a server
            self._server.stop()
        presence.notify("READY=1")
        _log.info("serving at %s", self._paths.agent_socket)
        if self._leaving is not None:
            self._departure = Departure(
                self._paths, self._leaving.quiet, self._store, self._tell, self._server.stop
            )
            self._stack.callback(self._departure.close)
        self._server.serve()
        self._workers.close(0.0)
        if self._leaving is not None and self._departure is not None:
            self._departure.close()
            self._depart(self._leaving, empty=self._departure.empty)
        _log.info("stopped")

    @contextmanager
    def _listener(self) -> Iterator[socket.socket]:
        """The listening socket. Its file stays, so that launchers wait for the next agent."""
        path = self._paths.agent_socket
        try:
            listener = unix_socket.listen(path, BACKLOG)
        except OSError as error:
            raise Unable(f"cannot listen at {path}: {error.strerror or error}") from None
        with listener:
            yield listener
            # A child process that was just forked may still have the descriptor.
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
                self._report.feed,
                removed=lambda: (self._state == GONE, self._state),
            )
        except OSError as error:
            raise Unable(
                f"cannot listen at {self._settings.listen}: {error.strerror}: free the address, or "
                f'set "agent.listen" in {self._paths.config} to another address'
            ) from None
        self._sockets.callback(endpoint.close)

    def _alive(self) -> tuple[bool, str]:
        if self._state.startswith("serving") and self._server and not self._server.lively():
            return False, "the serving thread has been stuck for 5 seconds: restart the agent"
        problem = "" if self._workers.able else self._workers.problem
        return not problem, problem or ("stopping" if self._stopping else self._state)

    def _ready(self) -> tuple[bool, str]:
        alive, text = self._alive()
        if not alive or text != "serving":
            return False, text
        failing = loop.failing()
        problem = f"{failing}: see the log" if failing else self._workers.problem
        return not problem, problem or text

    @property
    def _settings(self) -> Settings:
        return self._loaded.settings

    def _policy(self) -> Policy:
        self._loaded.require("policy")
        return self._settings.policy

    def _mistakes(self) -> Mapping[str, str]:
        """The text of each mistake in config.yaml, by section."""
        pools = self._devices.mistake
        return self._loaded.mistakes if pools is None else {**self._loaded.mistakes, "pools": pools}

    def _reload(self) -> None:
        """Read config.yaml again, and apply the settings that a running agent can change."""
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
            _log.info("the section ipam is correct now: stopping, so that the next agent reads it")
            self._stop()

    def _stop(self, signum: int = 0, frame: FrameType | None = None) -> None:
        self._stopping = True
        presence.notify_stopping(self._settings.grace + 2 * OVERTIME)
        if self._server is not None:
            self._server.stop()

    def _tell(self, state: str) -> None:
        self._state = state
        self._publish(state)

    def _stand_by(self) -> None:
        """Prepare now, while the other agent serves."""
        lock = self._paths.agent_lock
        self._tell(STANDING_BY if self._leaving is None else f"{STANDING_BY} to leave")
        text = f"another agent serves and holds {lock}: waiting until it ends (fuser {lock})"
        presence.notify(f"STATUS={text}")
        _log.info("%s", text)
        self._devices.prepare()

    def _leave(self) -> None:
        """Let the next agent take over. This agent finishes the running calls."""
        self._publish("stopping")
        self._withdrawing = threading.Thread(target=self._devices.close, name="withdrawing")
        self._withdrawing.start()
        self._stack.callback(self._withdrawing.join)
        self._sockets.close()
        for follower in self._followers:
            follower.close()
        self._policies.close()
        if self._departure is None or not self._departure.empty:
            self._turn.close()
            _log.info("the next agent gets the next calls")

    def _depart(self, leaving: Leaving, *, empty: bool) -> None:
        """Remove launchers and files if the node is empty. Then wait for SIGTERM."""
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
            time.sleep(presence.LOOK_EVERY)
