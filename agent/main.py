"""The agent from its start to SIGTERM.

It reads settings, sets up the log, takes the lock that makes it the only agent of the node, makes
the plugins and the socket, and reports that it is ready. The sweep runs beside the first calls,
each attachment under its own lock.
"""

import errno
import gc
import logging
import resource
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from types import FrameType

from agent import logs, settings, systemd, unix_socket
from agent.calls import Calls, Loader
from agent.http import Endpoint
from agent.metrics import Lasting, Metrics
from agent.server import BACKLOG, OVERTIME, Server
from agent.settings import UNIX, Settings, SettingsError
from agent.workers import Workers
from base import locks, msgspec_warmup
from base.paths import Paths
from cni import installation
from cni.attachments import pod_choices
from cni.attachments.journal import Journal, JournalDamaged
from cni.attachments.sweep import REMOVED, sweep_all
from cni.installation import OtherState
from cni.ipoib.plugin import IPoIB
from cni.policy.rules import Policy
from cni.rdma.plugin import Rdma
from cni.spec.errors import CNIError
from cni.sriov.plugin import Sriov
from deviceplugin.pools import formats
from deviceplugin.service import Service
from ipam.delegation import OURS, TAKEN_OVER
from ipam.executable import IpamExecutable
from ipam.plugin import AddressPlugin
from ipam.resident import Resident

Extra = Callable[[AddressPlugin], Mapping[str, Loader]]
"""More plugins by name, which may use the node's addresses."""

_log = logging.getLogger(__name__)


class Unable(Exception):
    """The agent cannot start. The text says why and what to do."""


def run(paths: Paths, extra: Extra = lambda addresses: {}) -> int:
    """Serve until SIGTERM; the exit code. `extra` replaces or adds plugins."""
    try:
        loaded = settings.load(paths.config)
        logs.configure(loaded)
        msgspec_warmup.build()
        _allow_descriptors()
        with ExitStack() as stack:
            stack.enter_context(_only_agent(paths))
            _claim(paths)
            agent = Agent(paths, loaded, extra, stack)
            agent.serve()
    except (Unable, SettingsError, systemd.Unsuitable) as error:
        _log.error("%s", error)
        return 1
    return 0


class Agent:
    """All parts of the agent, connected. What must be closed is on `stack`."""

    def __init__(self, paths: Paths, loaded: Settings, extra: Extra, stack: ExitStack) -> None:
        self._paths = paths
        self._settings = loaded
        self._stack = stack
        store = Resident(paths.ipam)
        stack.callback(store.close)
        self._addresses = AddressPlugin.on_node(store, cache(paths.boot_id), self._policy)
        self._ipoib = IPoIB(paths, self._addresses, self._policy)
        self._sriov = Sriov(paths, self._addresses, self._policy)
        self._rdma = Rdma(paths)
        self._devices = Service(
            paths,
            lambda: formats.load(paths.config),
            paths.config,
            pods_known=partial(pod_choices.prune, paths),
        )
        stack.callback(self._devices.close)
        self._workers = Workers(loaded.workers)
        self._metrics = Metrics(
            plugins=(OURS, "ipoib", "sriov", "ib-sriov", "rdma"),
            usage=self._addresses.usage,
            attachments=self._attachments,
            devices=self._devices.states,
            allocations=self._devices.held,
            by_range=loaded.listen.startswith(UNIX),  # only root can read there
        )
        listener = stack.enter_context(self._listener())
        self._server = Server(
            listener,
            Calls({**self._plugins(), **extra(self._addresses)}, self._metrics),
            self._workers,
            loaded,
            handed_over=self._activated,
            refused=self._metrics.refused,
        )
        self._metrics.watch(
            running=lambda: self._workers.running,
            waiting=lambda: self._workers.waiting,
            stuck=lambda: self._workers.stuck,
            connections=lambda: self._server.connections,
        )
        self._state = "starting"
        self._open_endpoint()

    def serve(self) -> None:
        """Serve until SIGTERM or SIGINT; then finish running calls and refuse the others."""
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        watched = settings.WatchedSettings(self._paths.config, self._settings, self._take)
        self._stack.callback(watched.close)
        self._devices.start()
        if self._settings.sweep:
            threading.Thread(target=self._sweep, name="sweep", daemon=True).start()
        gc.freeze()  # what exists now lasts: no collection needs to look at it
        gc.enable()
        watchdog = systemd.Watchdog(lambda: self._alive()[0])
        self._stack.callback(watchdog.close)
        if self._state == "starting":
            self._state = "serving"
        systemd.notify("READY=1")
        _log.info("serving at %s", self._paths.agent_socket)
        self._server.serve()
        self._workers.close(0.0)
        _log.info("stopped")

    def _plugins(self) -> dict[str, Loader]:
        ipam = IpamExecutable(self._addresses, self._paths.locks)
        return {
            "ipoib": lambda environ: self._ipoib,
            "sriov": lambda environ: self._sriov,
            "ib-sriov": lambda environ: self._sriov,
            "rdma": lambda environ: self._rdma,
            OURS: lambda environ: ipam,
            TAKEN_OVER: lambda environ: ipam,
        }

    @contextmanager
    def _listener(self) -> Iterator[socket.socket]:
        """The socket of systemd, which keeps it, or our own, which is removed at the end."""
        inherited = systemd.listening_socket()
        self._activated = inherited is not None
        if inherited is not None:
            with inherited:
                yield inherited
            return
        path = self._paths.agent_socket
        try:
            listener = unix_socket.listen(path, BACKLOG)
        except OSError as error:
            hint = ": is it systemd's? `systemctl start podfabric-agent`"
            more = hint if error.errno == errno.EADDRINUSE else ""
            raise Unable(f"cannot listen at {path}: {error.strerror or error}{more}") from None
        with listener:
            yield listener
            path.unlink(missing_ok=True)

    def _open_endpoint(self) -> None:
        if not self._settings.listen:
            return
        try:
            endpoint = Endpoint(
                self._settings.listen, Lasting(self._metrics.exposition), self._alive, self._ready
            )
        except OSError as error:
            raise Unable(
                f'cannot listen at {self._settings.listen}: {error.strerror}: set "agent.listen" '
                f"in {self._paths.config} to a free address"
            ) from None
        self._stack.callback(endpoint.close)

    def _alive(self) -> tuple[bool, str]:
        if self._state != "starting" and not self._server.lively():
            return False, "the serving thread has been stuck for 5 seconds: restart the agent"
        if not self._workers.able:
            return False, (
                f"no worker is free, {self._workers.stuck} are stuck in calls that do not end (the "
                "log names them): restart the agent"
            )
        return True, self._state

    def _ready(self) -> tuple[bool, str]:
        alive, text = self._alive()
        if not alive or self._state != "serving":
            return False, text
        stuck, limit = self._workers.stuck, self._workers.limit
        if 2 * stuck >= limit:
            return False, (
                f"{stuck} of {limit} workers are stuck in calls that do not end: see the log "
                "for the calls, and end what they wait for, or restart the agent"
            )
        return True, text

    def _policy(self) -> Policy:
        return self._settings.policy

    def _take(self, new: Settings) -> None:
        """Apply new settings, as far as a running agent can."""
        logs.configure(new)
        self._workers.limit = new.workers
        self._server.limits = new
        self._settings = new

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self._state = "stopping"
        systemd.notify_stopping(self._settings.grace + 2 * OVERTIME)
        self._server.stop()

    def _sweep(self) -> None:
        """Remove what a kill or a reboot left behind."""
        started = time.monotonic()
        try:
            outcomes = sweep_all(self._ipoib, self._sriov)
        except Exception as error:  # noqa: BLE001 - the agent serves, swept or not
            self._metrics.swept(removed=0, errors=1)
            _log.warning("sweep: %s", error, exc_info=not isinstance(error, CNIError))
            return
        removed = sum(isinstance(outcome, REMOVED) for outcome in outcomes)
        self._metrics.swept(removed=removed, errors=len(outcomes) - removed)
        for outcome in outcomes:
            _log.warning("sweep: %s", outcome)
        _log.info("sweep: %d removed in %.1f s", removed, time.monotonic() - started)

    def _attachments(self) -> Mapping[tuple[str, str], int]:
        """The number of journal entries by plugin and phase."""
        counted: Counter[tuple[str, str]] = Counter()
        for entry in Journal(self._paths).entries():
            if isinstance(entry, JournalDamaged):
                counted["", "damaged"] += 1
            else:
                counted[entry.plugin, entry.phase] += 1
        return counted


def _allow_descriptors() -> None:
    """Raise the limit of descriptors: a client has two or three, and the usual limit is 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextmanager
def _only_agent(paths: Paths) -> Iterator[None]:
    """Hold the lock of the node's agent. Raises Unable if another agent has it."""
    path = paths.state / "agent.lock"
    with ExitStack() as stack:
        try:
            stack.enter_context(locks.locked(path, "the agent", timeout=0, keep=True))
        except locks.Busy:
            raise Unable(f"another agent is running: it holds {path} (fuser {path})") from None
        except OSError as error:
            raise Unable(
                f"cannot use {paths.state}: {error.strerror}: make it writable for root"
            ) from None
        locks.remove_abandoned(paths.locks)
        yield


def _claim(paths: Paths) -> None:
    """Record the state directory of this boot: the fallback works on the same one or fails."""
    try:
        installation.claim(paths, installation.identify(paths.state))
    except OtherState as other:
        raise Unable(
            f"{other}: set PODFABRIC_STATE to that directory, or remove that file once no pod of "
            "this boot has an interface of podfabric"
        ) from None
    except OSError as error:
        raise Unable(
            f"cannot record in {paths.run} which state directory is in use: {error.filename}: "
            f"{error.strerror}: make it writable for root"
        ) from None
