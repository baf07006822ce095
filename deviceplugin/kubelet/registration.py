"""Serves a pool to the kubelet, and keeps it registered if the plugin or the kubelet restarts.

When the kubelet starts, it removes all sockets in device-plugins/ and makes its own again. One
thread per pool finds the missing step and does it. inotify and the pool's streams wake the thread.
"""

import errno
import logging
import math
import threading
import time

import grpc
import msgspec

from base import files
from base.loop import Backoff, StepThread
from base.paths import Paths
from base.problems import Problems
from base.watching import Waker
from deviceplugin.api import v1beta1_pb2, v1beta1_pb2_grpc
from deviceplugin.kubelet import plugin_sockets
from deviceplugin.kubelet.plugin_server import MOST_STREAMS, ServedPool, Servicer, Streams
from deviceplugin.kubelet.plugin_sockets import Listener, SocketError
from deviceplugin.kubelet.pod_resources import open_channel

VERSION = "v1beta1"

TIMEOUT = 15.0  # seconds for a Register; in it, the kubelet calls the plugin for up to 10 s
WATCHDOG = 10.0  # seconds without a ListAndWatch, after which the pool registers again
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0  # seconds between attempts; each pause doubles
SETTLE = 0.3  # seconds until the kubelet has noticed the end of a connection
LOOK_EVERY = 5.0  # seconds, if nothing wakes the thread
LOOK_FOR_DIRECTORY = 0.5  # seconds, while the directory does not exist
_OTHER_CALLS = 8  # threads for calls other than ListAndWatch

_log = logging.getLogger(__name__)


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a pool at the kubelet."""

    resource: str
    socket: str  # "" if there is none
    registered: bool  # the kubelet has accepted the pool and reads its list
    streams: int
    devices: int
    healthy: int
    problem: str  # why the pool is not registered; "" if it is


class PluginServer(StepThread):
    """Serves one resource and keeps it registered, from `start` until `close`."""

    def __init__(self, paths: Paths, pool: ServedPool) -> None:
        super().__init__(f"registration-{pool.name}", join=None)
        self._pool = pool
        self._resource = pool.name
        self._problem = ""
        self._directory = paths.device_plugins
        self._kubelet = paths.device_plugins / "kubelet.sock"
        self._streams = Streams()
        self._streams.on_change = self.wake
        self._servicer = Servicer(pool, self._streams)

        self._listener: Listener | None = None
        self._registered_at: tuple[int, ...] = ()  # the kubelet.sock of the last Register
        self._asked = math.inf  # when Register was last called
        self._live_since: float | None = None  # the time since which the kubelet reads the list
        self._due = 0.0  # when to call Register again
        self._listen_at = 0.0  # when to listen again after a failure
        self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        self._problems = Problems(_log)

        self._lock = threading.Lock()
        self._call: grpc.Future[v1beta1_pb2.Empty] | None = None
        self._waker = Waker()

    def changed(self, *, again: bool = False) -> None:
        """Send a changed list; with `again`, also an unchanged list."""
        self._streams.changed(again=again)

    def state(self) -> PoolState:
        listing, listener = self._pool.listing(), self._listener
        return PoolState(
            resource=self._resource,
            socket=str(listener.path) if listener is not None else "",
            registered=self._streams.since(self._asked),
            streams=self._streams.count,
            devices=len(listing),
            healthy=sum(healthy for _, healthy, _ in listing),
            problem=self._problem,
        )

    def close(self) -> None:
        """End the server, its threads and its socket. May be called again."""
        with self._lock:
            self._ended.set()
            call = self._call
        if call is not None:
            call.cancel()
        super().close()
        self._stop_listening()
        self._waker.close()

    def wake(self) -> None:
        self._waker.wake()

    def _run(self) -> None:
        if self._directory.is_dir():
            for path in plugin_sockets.remove_leftovers(self._directory):
                _log.info("%s: removed: no process listens on it", path)
        super()._run()

    def _rest(self, seconds: float) -> None:
        self._waker.wait(min(seconds, LOOK_EVERY))

    def step(self) -> float:
        """Do the missing step. Returns the seconds until the next step."""
        self._waker.follow((self._directory, self._directory.parent))
        # Look at the kubelet's socket first: the kubelet removes ours before it makes its own.
        kubelet = files.version(self._kubelet)
        if not self._directory.is_dir():
            self._say(f"{self._directory}: the directory does not exist: waiting for the kubelet")
            self._stop_listening()
            return LOOK_FOR_DIRECTORY
        now = time.monotonic()
        if self._listener is None or not self._listener.exists:
            if now < self._listen_at:
                return self._listen_at - now
            if not self._listen_again():
                return self._listen_at - time.monotonic()
            now = time.monotonic()
        if kubelet == (errno.ENOENT,):
            self._registered_at = ()
            self._say(f"{self._kubelet}: does not exist: waiting for the kubelet")
            return LOOK_EVERY
        if kubelet != self._registered_at:
            self._registered_at, self._due = kubelet, now
            self._backoff.reset()
        self._look_at_streams(now)
        if now < self._due:
            return self._due - now
        return self._ask()

    def _look_at_streams(self, now: float) -> None:
        if self._streams.since(self._asked):
            if self._live_since is None:
                _log.info("%s: registered: the kubelet reads its list", self._resource)
                self._live_since, self._due, self._problem = now, math.inf, ""
                self._problems.tell(self._resource, None)
        elif self._live_since is not None:
            if now - self._live_since > WATCHDOG:
                self._backoff.reset()
            self._live_since = None
            self._due = now + self._backoff.pause()
            self._problem = "the kubelet no longer reads its list"
            _log.info("%s: %s: registering again", self._resource, self._problem)

    def _ask(self) -> float:
        self._live_since = None
        self._asked = time.monotonic()
        try:
            self._register()
        except grpc.RpcError as error:
            pause = self._backoff.pause()
            if not self._ended.is_set():
                self._say(self._explained(error))
        else:
            pause = max(WATCHDOG, self._backoff.pause())
            if not self._problem:
                self._problem = "the kubelet accepted the resource but has not read its list yet"
        self._due = time.monotonic() + pause
        return 0  # the stream may be open already

    def _register(self) -> None:
        """Raises grpc.RpcError."""
        assert self._listener is not None
        request = v1beta1_pb2.RegisterRequest(
            version=VERSION,
            endpoint=self._listener.path.name,
            resource_name=self._resource,
            options=self._servicer.options,
        )
        with open_channel(self._kubelet) as channel:
            stub = v1beta1_pb2_grpc.RegistrationStub(channel)  # type: ignore[no-untyped-call]
            with self._lock:
                if self._ended.is_set():
                    return
                call = self._call = stub.Register.future(request, timeout=TIMEOUT)
            try:
                call.result()
            except grpc.FutureCancelledError:
                return  # by close()
            finally:
                self._call = None

    def _listen_again(self) -> bool:
        had_readers = self._streams.count > 0
        self._stop_listening()
        if had_readers:
            time.sleep(SETTLE)  # a kubelet that notices the end later would drop the new socket
        try:
            self._listener = Listener(
                self._directory, self._resource, self._servicer.serve, MOST_STREAMS + _OTHER_CALLS
            )
        except (SocketError, OSError) as error:
            self._listen_at = time.monotonic() + self._backoff.pause()
            self._say(str(error))
            return False
        self._registered_at = ()
        return True

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        self._live_since = None
        if listener is not None:
            listener.close(self._streams.end)

    def _say(self, problem: str) -> None:
        self._problem = problem
        self._problems.tell(self._resource, problem)

    def _explained(self, error: grpc.RpcError) -> str:
        code = error.code()
        if code is grpc.StatusCode.UNAVAILABLE:
            return f"{self._kubelet}: no process listens: check that the kubelet runs; trying again"
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return (
                f"{self._kubelet}: no answer to Register within {TIMEOUT:.0f} s: check the "
                "kubelet's log; trying again"
            )
        return f"{self._kubelet}: the kubelet refuses the resource: {error.details()}: trying again"
