"""A node without a runtime: `tests.runtime` starts the reference plugins in a namespace."""

import contextlib
import json
import os
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from host.namespaces import NetworkNamespace
from ipam.store import Reservation
from tests.host.podman.machine import PODFABRIC
from tests.runtime import Outcome, Runtime

NETNS = Path("/run/netns")
IFNAME = "eth0"


@dataclass(frozen=True)
class Node:
    """State is below `root`, executables are in `plugins`, interfaces in the namespace `netns`."""

    root: Path
    plugins: Path
    netns: Path

    @property
    def environ(self) -> dict[str, str]:
        """The environment of every process on the node."""
        state = {"PODFABRIC_STATE": self.root / "state", "PODFABRIC_RUN": self.root / "run"}
        return os.environ | {name: str(path) for name, path in state.items()}

    def call(
        self,
        command: str,
        config: Mapping[str, Any],
        pod: Path,
        previous: Mapping[str, Any] | None = None,
    ) -> Outcome:
        """One verb of the interface plugin for the pod with that namespace."""
        runtime = Runtime(self.plugins, self.environ)
        with NetworkNamespace.open(str(self.netns)) as node, node.entered():
            return runtime.call(
                command,
                config,
                container_id=pod.name,
                netns=str(pod),
                ifname=IFNAME,
                args=f"IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME={pod.name}",
                previous=previous,
            )

    def reservations(self) -> list[Reservation]:
        """The answer of `podfabric ipam list` on the node."""
        command = [str(PODFABRIC), "ipam", "list", "-o", "json"]
        done = subprocess.run(command, env=self.environ, check=True, capture_output=True)
        return msgspec.json.decode(done.stdout, type=list[Reservation])

    def reserved(self, pod: Path) -> list[str]:
        """The reserved addresses of the pod with that namespace."""
        return [one.address for one in self.reservations() if one.container_id == pod.name]


@contextlib.contextmanager
def namespace() -> Iterator[Path]:
    """A network namespace with a unique name."""
    name = f"pf-{uuid.uuid4().hex[:10]}"
    ip("netns", "add", name)
    try:
        yield NETNS / name
    finally:
        if (NETNS / name).exists():
            ip("netns", "delete", name)


def ip(*arguments: str) -> str:
    """Run ip(8)."""
    done = subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    return done.stdout


def addresses(pod: Path) -> list[str]:
    """The global addresses of the pod's interface, as CIDR."""
    links = json.loads(ip("-n", pod.name, "-json", "address", "show"))
    return [
        f"{one['local']}/{one['prefixlen']}"
        for link in links
        if link["ifname"] == IFNAME
        for one in link["addr_info"]
        if one["scope"] == "global"
    ]
