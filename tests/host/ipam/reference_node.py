"""A node without a runtime: `tests.runtime` starts the reference plugins in a namespace."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from host.namespaces import NetworkNamespace
from ipam.store import Reservation
from tests.netns import ip
from tests.runtime import Outcome, Runtime

IFNAME = "eth0"
PODFABRIC = Path(sys.prefix) / "bin" / "podfabric"


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
        return [
            reservation.address
            for reservation in self.reservations()
            if reservation.container_id == pod.name
        ]


def addresses(pod: Path) -> list[str]:
    """The global addresses of the pod's interface, as CIDR."""
    links = json.loads(ip("-n", pod.name, "-json", "address", "show"))
    return [
        f"{address['local']}/{address['prefixlen']}"
        for link in links
        if link["ifname"] == IFNAME
        for address in link["addr_info"]
        if address["scope"] == "global"
    ]
