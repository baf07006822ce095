"""A container runtime as a CNI plugin sees it: it starts processes and reads documents.

It does the work of libcni and Multus for one attachment. It reads the attachment definition, starts
the executables in CNI_PATH with the environment and standard input of the specification, and keeps
the result for CHECK and DEL.
"""

import json
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.printed import Printed

CHECKOUT = Path(__file__).resolve().parent.parent
CNI_BIN = Path(os.environ.get("PODFABRIC_TEST_BIN", CHECKOUT / "build/cni/bin"))
REFERENCE_PLUGINS = Path("/usr/lib/cni")  # Debian's containernetworking-plugins


@dataclass(frozen=True)
class Definition:
    """A NetworkAttachmentDefinition."""

    name: str
    config: dict[str, Any]


@dataclass(frozen=True)
class Outcome(Printed):
    """One call of one executable."""

    exit_code: int
    stdout: str
    stderr: str
    seconds: float


@dataclass
class Runtime:
    """Runs CNI executables. `environ` is its own environment, which it passes on completely."""

    bin_dir: Path = CNI_BIN
    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    timeout: float = 120.0

    def call(
        self,
        command: str,
        config: Mapping[str, Any] | bytes,
        *,
        container_id: str = "",
        netns: str = "",
        ifname: str = "net1",
        args: str = "",
        previous: Mapping[str, Any] | None = None,
    ) -> Outcome:
        """One verb of the plugin that `config` names, started as a process."""
        if isinstance(config, bytes):
            stdin, plugin = config, json.loads(config)["type"]
        else:
            chained = {"prevResult": previous} if previous else {}
            stdin = json.dumps({**config, **chained}).encode()
            plugin = config["type"]
        environ = self.environ | {
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": container_id,
            "CNI_NETNS": netns,
            "CNI_IFNAME": ifname,
            "CNI_ARGS": args,
            "CNI_PATH": f"{self.bin_dir}:{REFERENCE_PLUGINS}",
        }
        started = time.monotonic()
        done = subprocess.run(
            [str(self.bin_dir / plugin)],
            input=stdin,
            env=environ,
            capture_output=True,
            timeout=self.timeout,
            check=False,
        )
        seconds = time.monotonic() - started
        return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode(), seconds)


def definitions(path: Path) -> list[Definition]:
    """The attachment definitions of a YAML file, each config named as Multus names it."""
    found = []
    for document in yaml.safe_load_all(path.read_text()):
        if document["kind"] == "NetworkAttachmentDefinition":
            name = document["metadata"]["name"]
            config = json.loads(document["spec"]["config"])
            found.append(Definition(name, {"name": name} | config))
    return found


def pods(path: Path) -> list[dict[str, Any]]:
    """The pods of a YAML file."""
    return [d for d in yaml.safe_load_all(path.read_text()) if d["kind"] == "Pod"]
