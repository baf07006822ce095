"""An agent as a process, started again when it dies, and launchers that lead to it."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.plugins import CHECKOUT
from tests.waiting import PATIENCE

LAUNCHER = CHECKOUT / "build/cni/launcher"
START_TIME = 60.0  # seconds; imports are slow in the virtual machine


class Service:
    """`module` as an agent whose files are below `root`; `through` wraps the command.

    `command` is another way to start an agent.
    """

    def __init__(
        self,
        root: Path,
        module: str = "tests.plugins.agent",
        environ: Mapping[str, str] | None = None,
        through: Sequence[str] = (),
        command: Sequence[str] = (),
    ) -> None:
        self.root = root
        self.socket = root / "run/agent.sock"
        self.log = root / "agent.log"
        self.command = list(command) or [*through, sys.executable, "-m", module]
        self._environ = {
            **os.environ,
            "PODFABRIC_RUN": str(root / "run"),
            "PODFABRIC_STATE": str(root / "state"),
            "PODFABRIC_ETC": str(root / "etc"),
            **(environ or {}),
        }
        self._stopping = False
        self.process = self._start()
        self._keeper: threading.Thread | None = None

    def _start(self) -> "subprocess.Popen[bytes]":
        self.root.mkdir(parents=True, exist_ok=True)
        etc = self.root / "etc"
        etc.mkdir(exist_ok=True)
        if not (etc / "config.yaml").exists():  # several agents at once on one machine
            (etc / "config.yaml").write_text('agent:\n  listen: ""\n')
        with self.log.open("ab") as log:
            return subprocess.Popen(
                self.command, env=self._environ, cwd=CHECKOUT, stdout=log, stderr=log
            )

    def keep_alive(self) -> None:
        """Start it anew whenever it has died, until `stop`."""
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def _keep(self) -> None:
        while not self._stopping:
            self.process.wait()
            if not self._stopping:
                self.process = self._start()

    def wait_until_ready(self) -> None:
        """It accepts connections."""
        deadline = time.monotonic() + START_TIME
        while True:
            with suppress(OSError), socket.socket(socket.AF_UNIX) as client:
                client.connect(str(self.socket))
                return
            dead = self._keeper is None and self.process.poll() is not None
            if dead or time.monotonic() > deadline:
                raise AssertionError(f"the agent does not serve:\n{self.log.read_text()}")
            time.sleep(0.02)

    def stop(self) -> int:
        """End it by SIGTERM; its exit code."""
        self._stopping = True
        self.process.terminate()
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def install_launchers(directory: Path, names: Sequence[str]) -> None:
    """Copies of the launcher under those names; without a fallback beside them."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copy(LAUNCHER, directory / name)
