"""An agent with the plugin `moved`, as a child process of a measurement.

`python -m bench.agent` is the child; `Agent` starts it and the executables that lead to it.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from base.paths import Paths

CHECKOUT = Path(__file__).resolve().parent.parent
LAUNCHER = CHECKOUT / "build/cni/launcher"
NAMES = ("podfabric-ipam", "moved", "ipoib", "sriov")
START_TIME = 300.0  # seconds: an emulated CPU needs 10 to 60


class Agent:
    """A running agent whose files are below `root`; a context manager that ends it.

    `environ` is added to the environment.
    """

    def __init__(
        self,
        root: Path,
        *,
        names: Sequence[str] = NAMES,
        config: str = 'agent:\n  listen: ""\n',
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.root = root
        self._names = names
        self._config = config
        self._environ = environ
        self.executables = root / "bin"
        self.socket = root / "run/agent.sock"
        self.log = root / "agent.log"

    def __enter__(self) -> Self:
        self.executables.mkdir(parents=True, exist_ok=True)
        for name in self._names:
            shutil.copy(LAUNCHER, self.executables / name)
        (self.root / "etc").mkdir()
        (self.root / "etc/config.yaml").write_text(self._config)
        roots = {name: str(self.root / name.lower()) for name in ("RUN", "STATE", "ETC")}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.agent"],
                env={
                    **os.environ,
                    **{f"PODFABRIC_{name}": path for name, path in roots.items()},
                    **self._environ,
                },
                cwd=CHECKOUT,
                stdout=log,
                stderr=log,
                preexec_fn=_ignore_interrupts,
            )
        self._wait_until_it_serves()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def resident_bytes(self) -> int:
        """Its VmRSS (proc_pid_status(5))."""
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) << 10
        raise RuntimeError("the agent has ended")

    def call_seconds(self, start: int) -> list[float]:
        """How long calls took inside the agent, of those logged after `start` bytes."""
        with self.log.open("rb") as log:
            log.seek(start)
            words = [line.split() for line in log.read().decode().splitlines()]
        return [float(line[line.index("done") + 2]) / 1e3 for line in words if "done" in line]

    def _wait_until_it_serves(self) -> None:
        deadline = time.monotonic() + START_TIME
        while True:
            with suppress(OSError), socket.socket(socket.AF_UNIX) as client:
                client.connect(str(self.socket))
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                raise RuntimeError(f"the agent does not serve:\n{self.log.read_text()}")
            time.sleep(0.02)


def _ignore_interrupts() -> None:
    """Ctrl-C is for the measurement, which ends the agent when it has done with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def main() -> int:
    """Serve until SIGTERM."""
    from agent import main as agent
    from agent.calls import Loader
    from bench.moved import Moved
    from ipam.plugin import AddressPlugin

    paths = Paths.from_environ(os.environ)

    def extra(addresses: AddressPlugin) -> dict[str, Loader]:
        plugin = Moved(paths, addresses)
        return {"moved": lambda environ: plugin}

    return agent.run(paths, extra)


if __name__ == "__main__":
    sys.exit(main())
