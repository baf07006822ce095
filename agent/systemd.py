"""systemd's protocols: sd_notify(3) and sd_watchdog_enabled(3).

Without systemd's environment variables, the functions here do nothing.
"""

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping

NOTIFY_TIME = 1.0  # seconds to wait for a manager that does not read

_log = logging.getLogger(__name__)


def notify(*states: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Send states such as "READY=1" to the service manager; whether they were sent.

    Safe in a signal handler.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):  # an abstract address
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.settimeout(NOTIFY_TIME)
            manager.sendto("\n".join(states).encode(), address)
    except OSError:  # the agent cannot help it
        return False
    return True


def notify_stopping(within: float) -> bool:
    """Report that the agent stops, and ask for that many seconds in place of TimeoutStopSec=."""
    return notify("STOPPING=1", f"EXTEND_TIMEOUT_USEC={round(within * 1e6)}")


class Watchdog:
    """Sends systemd signs of life while `alive` returns true, until `close`.

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
        """Send no more signs of life."""
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


def _watchdog_interval(environ: Mapping[str, str]) -> float | None:
    """Seconds between two signs of life, half of what is allowed; None without a watchdog."""
    allowed = environ.get("WATCHDOG_USEC", "")
    process = environ.get("WATCHDOG_PID", "")
    if not allowed.isdecimal() or (process and process != str(os.getpid())):
        return None
    return int(allowed) / 2e6
