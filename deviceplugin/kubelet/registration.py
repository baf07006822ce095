"""Registers a pool with the kubelet, and keeps it registered when either side restarts.

In mode "legacy" the plugin's socket is in device-plugins/, and the plugin calls Register on
kubelet.sock. A kubelet that starts removes all sockets there and makes its own again. In mode
"watcher" the socket is in plugins_registry/, where the kubelet finds it and calls it; a new
registration needs a new socket.

One thread per pool looks at the current state and does what is missing. inotify and the pool's
streams only wake it.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import grpc

from base.paths import Paths
from base.watching import Waker
from deviceplugin.api import (
    pluginregistration_pb2,
    pluginregistration_pb2_grpc,
    v1beta1_pb2,
    v1beta1_pb2_grpc,
)
from deviceplugin.kubelet import sockets
from deviceplugin.kubelet.channels import open_channel
from deviceplugin.kubelet.sockets import Identity, Listener, SocketError
from deviceplugin.kubelet.streams import Streams

RegistrationMode = Literal["legacy", "watcher"]

VERSION = "v1beta1"


def options(*, pre_start: bool) -> v1beta1_pb2.DevicePluginOptions:
    """A pool's options; with `pre_start` the kubelet calls PreStartContainer before each start."""
    return v1beta1_pb2.DevicePluginOptions(
        pre_start_required=pre_start, get_preferred_allocation_available=True
    )


TIMEOUT = 15.0  # seconds for a Register, in which the kubelet calls back for up to 10
WATCHDOG = 10.0  # seconds without a ListAndWatch, after which the pool registers again
FIRST_PAUSE, LONGEST_PAUSE = (
    0.1,
    30.0,
)  # seconds between attempts; each pause is twice as long as the last
SETTLE = 0.3  # seconds until the kubelet has noticed the end of a connection
LOOK_EVERY = 5.0  # seconds, if nothing wakes the thread
LOOK_FOR_DIRECTORY = 0.5  # seconds, while it does not exist

_log = logging.getLogger(__name__)


class Keeper:
    """Keeps one pool served and registered, in a thread, from `start` until `close`.

    `listen` makes a listener in a directory. An open stream in `streams` shows that the kubelet has
    accepted the pool.
    """

    def __init__(
        self,
        paths: Paths,
        resource: str,
        mode: RegistrationMode,
        listen: Callable[[Path], Listener],
        streams: Streams,
        *,
        pre_start: bool = False,
    ) -> None:
        self.problem = ""
        self._resource = resource
        self._options = options(pre_start=pre_start)
        self._legacy = mode == "legacy"
        self._directory = (
            paths.device_plugins if self._legacy else paths.kubelet / "plugins_registry"
        )
        self._kubelet = paths.device_plugins / "kubelet.sock"
        self._listen = listen
        self._streams = streams

        self._listener: Listener | None = None
        self._registered_at: Identity | None = None  # the kubelet.sock of the last Register
        self._asked = math.inf  # when the kubelet was asked to accept the pool
        self._live_since: float | None = None  # since when it reads the list
        self._due = 0.0  # when to ask it again
        self._listen_at = 0.0  # when to try again after that failed
        self._attempts = 0  # since it last read the list for a while
        self._siblings: set[Path] = set()
        self._refused: str | None = None  # the kubelet's reason (watcher)
        self._logged: set[str] = set()  # problems that are in the log already

        self._lock = threading.Lock()
        self._closing = False
        self._call: grpc.Future[v1beta1_pb2.Empty] | None = None
        self._waker = Waker()
        self._thread: threading.Thread | None = None

    @property
    def socket(self) -> str:
        """The path of the pool's current socket; "" if it has none."""
        listener = self._listener
        return str(listener.path) if listener is not None else ""

    @property
    def registered(self) -> bool:
        """The kubelet has accepted the pool and reads its list."""
        return self._streams.since(self._asked)

    def start(self) -> None:
        """Start the thread. Call it once."""
        self._thread = threading.Thread(
            target=self._run, name=f"registration-{self._resource}", daemon=True
        )
        self._thread.start()

    def wake(self) -> None:
        """Have the thread look now."""
        self._waker.wake()

    def close(self) -> None:
        """End the server and the registration. May be called again."""
        with self._lock:
            self._closing = True
            call = self._call
        if call is not None:
            call.cancel()
        self.wake()
        if self._thread is not None:
            self._thread.join()
        self._stop_listening()
        self._waker.close()

    def serve(self, server: grpc.Server) -> None:
        """Add the service that the kubelet's plugin watcher calls to a server."""
        pluginregistration_pb2_grpc.add_RegistrationServicer_to_server(  # type: ignore[no-untyped-call]
            _RegistrationService(self._info, self._notified), server
        )

    def _run(self) -> None:
        if self._directory.is_dir():
            for path in sockets.remove_leftovers(self._directory):
                _log.info("%s: removed: no process listens on it", path)
        while not self._closing:
            self._waker.follow((self._directory, self._directory.parent))
            try:
                pause = self._step()
            except Exception:  # noqa: BLE001 - without the thread the pool would be lost
                _log.exception("%s: its registration", self._resource)
                pause = LOOK_EVERY
            self._waker.wait(min(pause, LOOK_EVERY))

    def _step(self) -> float:
        """Do what is missing now; return the seconds until the next step."""
        # The kubelet's socket first: a kubelet removes ours before it makes its own.
        kubelet = sockets.identity(self._kubelet)
        if not self._directory.is_dir():
            self._say(f"{self._directory}: the directory does not exist: waiting for the kubelet")
            self._stop_listening()
            return LOOK_FOR_DIRECTORY
        now = time.monotonic()
        if self._listener is None or not self._listener.exists:
            if now < self._listen_at:
                return self._listen_at - now
            if not self._listen_again():
                return self._pause()
            now = time.monotonic()
        if self._legacy:
            if kubelet is None:
                self._registered_at = None
                self._say(f"{self._kubelet}: does not exist: waiting for the kubelet")
                return LOOK_EVERY
            if kubelet != self._registered_at:
                self._registered_at, self._attempts, self._due = kubelet, 0, now
        self._look_at_streams(now)
        self._look_at_siblings(now)
        if now < self._due:
            return self._due - now
        return self._ask()

    def _look_at_streams(self, now: float) -> None:
        if self.registered:
            if self._live_since is None:
                _log.info("%s: registered: the kubelet reads its list", self._resource)
                self._live_since, self._due, self.problem = now, math.inf, ""
                self._logged.clear()
        elif self._live_since is not None:
            if now - self._live_since > WATCHDOG:
                self._attempts = 0
            self._live_since = None
            self._due = now + (self._pause() if self._legacy and not self._newer() else WATCHDOG)
            self.problem = "the kubelet has stopped reading its list"
            _log.info("%s: %s: registering again", self._resource, self.problem)
        elif self._refused is not None:
            self._say(f"{self.socket}: the kubelet refuses it: {self._refused}: trying again")
            self._refused, self._due = None, now + self._pause()

    def _look_at_siblings(self, now: float) -> None:
        """Register again after another instance has ended.

        A kubelet has one endpoint per resource, and may drop the resource when another instance's
        connection ends (kubernetes issue 121994).
        """
        own = self._listener.path if self._listener is not None else None
        siblings = sockets.siblings(self._directory, self._resource, own)
        if siblings:
            siblings -= set(sockets.remove_leftovers(self._directory))
        gone, self._siblings = self._siblings - siblings, siblings
        if gone and self._legacy and self._live_since is not None:
            _log.info("%s: another instance ended: registering again", self._resource)
            self._due = min(self._due, now + SETTLE)

    def _newer(self) -> bool:
        """Whether another instance started after this one: the kubelet probably uses that."""
        own = sockets.identity(self._listener.path) if self._listener is not None else None
        others = (sockets.identity(path) for path in self._siblings if sockets.served(path))
        return own is not None and any(other and other[2] > own[2] for other in others)

    def _ask(self) -> float:
        """Have the kubelet accept the pool; return the seconds until the next step."""
        self._attempts += 1
        self._live_since = None
        if not self._legacy:
            self._due = time.monotonic() + LOOK_EVERY
            if not sockets.served(self._kubelet):
                return LOOK_EVERY  # it will find the socket when it starts
            self._say(f"{self.socket}: the kubelet does not read the list: making a new socket")
            return 0 if self._listen_again() else self._pause()
        asked = time.monotonic()
        self._asked = asked
        try:
            self._register()
        except grpc.RpcError as error:
            pause = self._pause()
            if not self._closing:
                self._say(self._explained(error))
        else:
            pause = max(WATCHDOG, self._pause())
            if not self.problem:
                self.problem = "the kubelet accepted it and has not read its list yet"
        self._due = time.monotonic() + pause
        return 0  # the stream may be there already

    def _register(self) -> None:
        """Call Register. Raises grpc.RpcError."""
        assert self._listener is not None
        request = v1beta1_pb2.RegisterRequest(
            version=VERSION,
            endpoint=self._listener.path.name,
            resource_name=self._resource,
            options=self._options,
        )
        with open_channel(self._kubelet) as channel:
            stub = v1beta1_pb2_grpc.RegistrationStub(channel)  # type: ignore[no-untyped-call]
            with self._lock:
                if self._closing:
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
            time.sleep(SETTLE)  # a kubelet that notices the end later would drop the new one
        try:
            self._listener = self._listen(self._directory)
        except (SocketError, OSError) as error:
            self._attempts += 1
            self._listen_at = time.monotonic() + self._pause()
            self._say(str(error))
            return False
        self._registered_at = None
        self._refused = None
        if not self._legacy:
            self._asked = time.monotonic()
            self._due = self._asked + max(WATCHDOG, self._pause())
        return True

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        self._live_since = None
        if listener is not None:
            listener.close(self._streams.end)

    def _pause(self) -> float:
        return float(min(FIRST_PAUSE * 2 ** min(self._attempts, 20), LONGEST_PAUSE))

    def _say(self, problem: str) -> None:
        """Log a problem, once until the next success."""
        self.problem = problem
        if problem not in self._logged:
            self._logged.add(problem)
            _log.warning("%s: %s", self._resource, problem)

    def _explained(self, error: grpc.RpcError) -> str:
        code = getattr(error, "code", lambda: None)()  # the exception is a Call, too
        details = getattr(error, "details", lambda: str(error))()
        if code is grpc.StatusCode.UNAVAILABLE:
            return f"{self._kubelet}: no process listens: is the kubelet running? Trying again"
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return (
                f"{self._kubelet}: no answer to Register within {TIMEOUT:.0f} s: look at the "
                "kubelet's log; trying again"
            )
        return f"{self._kubelet}: the kubelet refuses the resource: {details}: trying again"

    def _info(self) -> pluginregistration_pb2.PluginInfo:
        return pluginregistration_pb2.PluginInfo(
            type="DevicePlugin",
            name=self._resource,
            endpoint=self.socket,
            supported_versions=[VERSION],
        )

    def _notified(self, status: pluginregistration_pb2.RegistrationStatus) -> None:
        if not status.plugin_registered:
            self._refused = status.error or "without a reason"
            self.wake()


class _RegistrationService(pluginregistration_pb2_grpc.RegistrationServicer):
    """/pluginregistration.Registration. The kubelet waits one second for GetInfo."""

    def __init__(
        self,
        info: Callable[[], pluginregistration_pb2.PluginInfo],
        notified: Callable[[pluginregistration_pb2.RegistrationStatus], None],
    ) -> None:
        self._info = info
        self._notified = notified

    def GetInfo(
        self, request: pluginregistration_pb2.InfoRequest, context: grpc.ServicerContext
    ) -> pluginregistration_pb2.PluginInfo:
        return self._info()

    def NotifyRegistrationStatus(
        self, request: pluginregistration_pb2.RegistrationStatus, context: grpc.ServicerContext
    ) -> pluginregistration_pb2.RegistrationStatusResponse:
        self._notified(request)
        return pluginregistration_pb2.RegistrationStatusResponse()
