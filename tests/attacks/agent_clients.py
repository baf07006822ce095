"""Clients of an agent that use its socket, because a process for each call would be too slow."""

import json
import os
import socket
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.serve.framing import LauncherRequest
from tests.frames import write_request
from tests.host.agent.serving import Reply, read
from tests.plugins.service import Service
from tests.waiting import PATIENCE


@dataclass
class Caller:
    """A node's runtime. `bin_dir` is CNI_PATH, and test doubles record their calls in `state`."""

    service: Service
    bin_dir: Path
    state: Path

    def environ(self, verb: str, container: str, more: Mapping[str, str]) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "PODFABRIC_SOCKET": str(self.service.socket),
            "PODFABRIC_STATE": str(self.state),
            "CNI_COMMAND": verb,
            "CNI_CONTAINERID": container,
            "CNI_IFNAME": "net1",
            "CNI_NETNS": "/none",
            "CNI_PATH": str(self.bin_dir),
            "PODFABRIC_CNI_BIN": str(self.bin_dir),
            **more,
        }

    def start(
        self, plugin: str, verb: str, container: str, config: bytes, **more: str
    ) -> socket.socket:
        """Send a request over the socket, without reading the answer."""
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.settimeout(PATIENCE)
        client.connect(str(self.service.socket))
        request = LauncherRequest(plugin, self.environ(verb, container, more), config)
        client.sendall(write_request(request))
        return client

    def ask(self, plugin: str, verb: str, container: str, config: bytes, **more: str) -> Reply:
        """Call over the socket. Raises EOFError or OSError if the answer is incomplete."""
        with self.start(plugin, verb, container, config, **more) as client:
            return read(client)

    def launch(
        self, plugin: str, verb: str, container: str, config: bytes, **more: str
    ) -> "subprocess.CompletedProcess[bytes]":
        """Call through the launcher, as a runtime does."""
        return subprocess.run(
            [self.bin_dir / plugin],
            input=config,
            env=self.environ(verb, container, more),
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        )


@dataclass
class Tally:
    """The number of answered calls, and the errors of the failed ones."""

    answered: int = 0
    broken: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, wrong: str = "") -> int:
        """Count one more call; returns the number of calls so far."""
        with self._lock:
            if wrong:
                self.broken.append(wrong)
            else:
                self.answered += 1
            return self.answered + len(self.broken)


def network(name: str, plugin: str, **more: Any) -> bytes:  # noqa: ANN401 - any JSON value
    """A network configuration."""
    return json.dumps({"cniVersion": "1.1.0", "name": name, "type": plugin, **more}).encode()
