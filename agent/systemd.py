"""systemd's protocols: sd_notify(3) and sd_watchdog_enabled(3).

Without systemd's environment variables, the functions here do nothing.
"""

import logging
import os
import socket
from collections.abc import Callable, Mapping

from base.loop import StepThread

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


class Watchdog(StepThread):
    """Sends systemd signs of life while `alive` returns true, until `close`.

    Does nothing if the unit has no WatchdogSec=.
    """

    def __init__(self, alive: Callable[[], bool], environ: Mapping[str, str] = os.environ) -> None:
        super().__init__("watchdog")
        self._alive = alive
        self._environ = environ
        self._silent = False
        self._interval = _watchdog_interval(environ)
        if self._interval:
            self.start()

    def step(self) -> float:
        """Send a sign of life if there is one."""
        alive = self._alive()
        if alive:
            notify("WATCHDOG=1", environ=self._environ)
        elif not self._silent:
            _log.error("the agent does not serve: systemd is going to end it")
        self._silent = not alive
        return self._interval


def _watchdog_interval(environ: Mapping[str, str]) -> float:
    """Seconds between two signs of life, half of what is allowed; 0 without a watchdog."""
    allowed = environ.get("WATCHDOG_USEC", "")
    process = environ.get("WATCHDOG_PID", "")
    if not allowed.isdecimal() or (process and process != str(os.getpid())):
        return 0.0
    return int(allowed) / 2e6
