"""An agent as a process, restarted after each death, and launchers that call it."""

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.plugins import CHECKOUT
from tests.waiting import PATIENCE, until

LAUNCHER = CHECKOUT / "build/cni/launcher"


class Service:
    """`module` as an agent whose files are below `root`; `through` wraps the command.

    `command` is an alternative command to start an agent.
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
        self._starting = threading.Lock()  # `stop` and the keeper are different threads
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
        """Restart it after each death, until `stop`."""
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def _keep(self) -> None:
        while not self._stopping:
            self.process.wait()
            with self._starting:
                if not self._stopping:
                    self.process = self._start()

    def wait_until_ready(self) -> None:
        """Wait until it accepts connections."""
        until(lambda: self._serves() or self._is_dead())
        assert self._serves(), f"the agent does not serve:\n{self.log.read_text()}"

    def _serves(self) -> bool:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.connect(str(self.socket))
            return True
        return False

    def _is_dead(self) -> bool:
        return self._keeper is None and self.process.poll() is not None

    def stop(self) -> int:
        """End it with SIGTERM and return its exit code."""
        with self._starting:
            self._stopping = True
        self.process.terminate()
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def install_launchers(directory: Path, names: Sequence[str]) -> None:
    """Copies of the launcher under those names."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copy(LAUNCHER, directory / name)
