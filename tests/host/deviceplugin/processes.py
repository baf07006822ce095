"""`podfabric` on a simulated server's roots, as processes that are ended and killed."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from base.paths import Paths
from tests.runtime import CHECKOUT
from tests.unit.host import servers
from tests.waiting import PATIENCE

PODFABRIC = Path(sys.executable).with_name("podfabric")


def made_server(root: Path) -> Paths:
    """The server of eight HCAs. `root` must be short, for sockets."""
    paths = servers.dgx(root, nodes=True)
    boot_id = paths.proc / "sys/kernel/random/boot_id"
    boot_id.parent.mkdir(parents=True, exist_ok=True)
    boot_id.write_text("9b6b5c1e-0d5a-4a3f-8f0e-6d5b1b1c9d11\n")
    paths.etc.mkdir(exist_ok=True)
    return paths


def configure(paths: Paths, *pools: Mapping[str, object], **parts: object) -> None:
    """Write config.yaml by a rename, as editors and ConfigMaps do."""
    temporary = paths.etc / ".config.new"
    temporary.write_text(json.dumps({"pools": list(pools), **parts}))
    temporary.replace(paths.config)


class Process:
    """A running `podfabric PART`."""

    def __init__(self, paths: Paths, part: str, flags: Sequence[str] = ()) -> None:
        roots = {
            f"PODFABRIC_{name.upper()}": str(getattr(paths, name))
            for name in Paths.__struct_fields__
        }
        self._log = paths.kubelet.parent / f"{part}-{time.monotonic_ns()}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [PODFABRIC, part, *flags], env={**os.environ, **roots}, cwd=CHECKOUT, stderr=log
            )

    @property
    def log(self) -> str:
        """The process' log until now."""
        return self._log.read_text()

    def kill(self) -> None:
        """Kill the process, without a chance to clean up."""
        self.process.kill()
        self.process.wait(PATIENCE)

    def end(self) -> int:
        """End the process as systemd does; returns its exit code."""
        self.process.terminate()
        return self.process.wait(PATIENCE)


@contextmanager
def running(
    paths: Paths, part: str = "device-plugin", flags: Sequence[str] = ()
) -> Iterator[Process]:
    """A process that is ended after the block."""
    process = Process(paths, part, flags)
    try:
        yield process
    finally:
        process.kill()
