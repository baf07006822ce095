"""What systemd and the agent tell each other: sd_notify(3), sd_watchdog_enabled(3), its sockets.

Nothing here needs systemd: without its variables in the environment, nothing happens.
"""

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import ExitStack

FIRST_DESCRIPTOR = 3  # SD_LISTEN_FDS_START
NAME = "agent"  # the socket unit's FileDescriptorName=
NOTIFY_TIME = 1.0  # seconds; a manager that does not read must not hold us up

_log = logging.getLogger(__name__)


class Unsuitable(Exception):
    """What systemd handed over is no socket that launchers could use. The text says why."""


def notify(*states: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Tell the service manager, "READY=1" for example; whether it was told.

    A signal handler may do so.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):  # an abstract one
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.settimeout(NOTIFY_TIME)
            manager.sendto("\n".join(states).encode(), address)
    except OSError:  # nothing that an agent could do about it
        return False
    return True


def notify_stopping(within: float) -> bool:
    """The end has begun, and may take that many seconds, whatever the unit's TimeoutStopSec=."""
    return notify("STOPPING=1", f"EXTEND_TIMEOUT_USEC={round(within * 1e6)}")


def listening_socket(environ: MutableMapping[str, str] = os.environ) -> socket.socket | None:
    """The socket that systemd listens on for us, if it does. Raises Unsuitable.

    Its variables are gone afterwards, since a delegate that inherits them would take the
    descriptors for its own.
    """
    given = {name: environ.pop(f"LISTEN_{name}", "") for name in ("PID", "FDS", "FDNAMES")}
    if given["PID"] != str(os.getpid()) or not given["FDS"].isdecimal() or given["FDS"] == "0":
        return None
    count = int(given["FDS"])
    names = given["FDNAMES"].split(":") if given["FDNAMES"] else []
    with ExitStack() as stack:
        sockets = [stack.enter_context(_adopted(FIRST_DESCRIPTOR + n)) for n in range(count)]
        if count == 1:
            chosen = sockets[0]
        elif names.count(NAME) == 1 and len(names) == count:
            chosen = sockets[names.index(NAME)]
        else:
            raise Unsuitable(
                f"systemd handed over {count} sockets, named {', '.join(names) or 'nothing'}: set "
                f"FileDescriptorName={NAME} in the unit of the one that launchers use"
            )
        _require_listening(chosen)
        return chosen.dup()


def _adopted(descriptor: int) -> socket.socket:
    try:
        os.set_inheritable(descriptor, False)
        return socket.socket(fileno=descriptor)
    except OSError as error:
        raise Unsuitable(
            f"descriptor {descriptor}, handed over by systemd, is no socket: {error.strerror}"
        ) from None


def _require_listening(given: socket.socket) -> None:
    unix_stream = given.family == socket.AF_UNIX and given.type == socket.SOCK_STREAM
    if not unix_stream or not given.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise Unsuitable(
            f"systemd handed over {given.getsockname()!r}, which is no unix stream socket that "
            "listens: the unit needs ListenStream= with a path, and Accept=no"
        )


class Watchdog:
    """Tells systemd that the agent lives, for as long as `alive` says so, until `close`.

    Does nothing if the unit has no WatchdogSec=.
    """

    def __init__(self, alive: Callable[[], bool], environ: Mapping[str, str] = os.environ) -> None:
        self._alive = alive
        self._environ = environ
        self._ended = threading.Event()
        self._interval = _watchdog_interval(environ)
        self._thread: threading.Thread | None = None
        if self._interval:
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Say nothing any more."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        silent = False
        while True:
            alive = self._alive()
            if alive:
                notify("WATCHDOG=1", environ=self._environ)
            elif not silent:
                _log.error("the agent does not serve: systemd is going to end it")
            silent = not alive
            if self._ended.wait(self._interval):
                return


def _watchdog_interval(environ: Mapping[str, str]) -> float:
    """Seconds between two signs of life, half of what is allowed; 0 for none."""
    allowed = environ.get("WATCHDOG_USEC", "")
    process = environ.get("WATCHDOG_PID", "")
    if not allowed.isdecimal() or (process and process != str(os.getpid())):
        return 0.0
    return int(allowed) / 2e6
