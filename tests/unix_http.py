"""HTTP over a unix socket."""

import http.client
import socket
from pathlib import Path

from tests.waiting import PATIENCE


class UnixHTTPConnection(http.client.HTTPConnection):
    """A client of the agent's health and metrics."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=PATIENCE)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(str(self._path))
