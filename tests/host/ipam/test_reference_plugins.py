"""The reference interface plugins (Go) as callers of podfabric-ipam, in each CNI version."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from host.namespaces import NetworkNamespace
from tests.netns import ip, namespace
from tests.runtime import CNI_BIN, REFERENCE_PLUGINS, Outcome, Runtime

IFNAME, PARENT = "eth0", "parent0"
PLUGINS: dict[str, dict[str, Any]] = {
    "bridge": {"type": "bridge", "bridge": "fabric", "isGateway": True},
    "macvlan": {"type": "macvlan", "master": PARENT},
    "host-device": {"type": "host-device", "device": PARENT},
}


def configured(plugin: str, version: str = "1.0.0", ipam: str = "podfabric-ipam") -> dict[str, Any]:
    options = {"type": ipam, "range": "10.77.0.0/24", "gateway": "10.77.0.1"}
    return {"cniVersion": version, "name": "fabric", **PLUGINS[plugin], "ipam": options}


@dataclass(frozen=True)
class Node:
    """State is below `root`, interfaces are in the namespace `netns`."""

    root: Path
    netns: Path
    pod: Path

    @property
    def environ(self) -> dict[str, str]:
        state = {"PODFABRIC_STATE": self.root / "state", "PODFABRIC_RUN": self.root / "run"}
        return os.environ | {name: str(path) for name, path in state.items()}

    def call(
        self, command: str, config: Mapping[str, Any], previous: Mapping[str, Any] | None = None
    ) -> Outcome:
        """One verb of the interface plugin for the pod."""
        runtime = Runtime(self.root / "bin", self.environ)
        with NetworkNamespace.open(str(self.netns)) as node, node.entered():
            return runtime.call(
                command,
                config,
                container_id=self.pod.name,
                netns=str(self.pod),
                ifname=IFNAME,
                args=f"IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME={self.pod.name}",
                previous=previous,
            )

    def reserved(self) -> list[str]:
        command = [str(Path(sys.executable).with_name("podfabric")), "ipam", "list", "-o", "json"]
        done = subprocess.run(command, env=self.environ, check=True, capture_output=True)
        return [each["address"] for each in json.loads(done.stdout)]

    def addresses(self) -> list[str]:
        """The global addresses of the pod's interface, as CIDR."""
        links = json.loads(ip("-n", self.pod.name, "-json", "address", "show"))
        return [
            f"{address['local']}/{address['prefixlen']}"
            for link in links
            if link["ifname"] == IFNAME
            for address in link["addr_info"]
            if address["scope"] == "global"
        ]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A fresh node with a pod, a parent for macvlan, the reference plugins, and podfabric-ipam
    under its two names."""
    (tmp_path / "bin").mkdir()
    for executable in (
        *(REFERENCE_PLUGINS / name for name in PLUGINS),
        *(CNI_BIN / name for name in ("podfabric-ipam", "whereabouts")),
    ):
        assert executable.exists(), f"{executable} is missing: make cni"
        (tmp_path / "bin" / executable.name).symlink_to(executable)
    with namespace() as netns, namespace() as pod:
        ip("-n", netns.name, "link", "add", PARENT, "type", "veth", "peer", "name", "parent1")
        for name in (PARENT, "parent1"):
            ip("-n", netns.name, "link", "set", name, "up")
        yield Node(tmp_path, netns, pod)


@pytest.mark.parametrize(
    ("plugin", "version", "ipam"),
    [
        *((plugin, "1.0.0", "podfabric-ipam") for plugin in ("bridge", "macvlan")),
        *(("bridge", version, "podfabric-ipam") for version in ("0.3.1", "0.4.0")),
        *((plugin, "1.0.0", "whereabouts") for plugin in PLUGINS),
    ],
)
def test_an_attachment_lives_from_add_to_del(
    node: Node, plugin: str, version: str, ipam: str
) -> None:
    config = configured(plugin, version, ipam)
    added = node.call("ADD", config)
    assert added.exit_code == 0, added.stdout
    result = added.document
    assert result["cniVersion"] == version
    [address] = result["ips"]
    assert (address["address"], address["gateway"]) == ("10.77.0.2/24", "10.77.0.1")
    assert node.addresses() == ["10.77.0.2/24"]
    assert node.reserved() == ["10.77.0.2"]
    if version != "0.3.1":  # that version has no CHECK
        checked = node.call("CHECK", config, result)
        assert (checked.exit_code, checked.stdout) == (0, "")
    deleted = node.call("DEL", config, result)
    assert (deleted.exit_code, deleted.stdout) == (0, "")
    assert node.addresses() == node.reserved() == []
    if plugin != "host-device":  # it looks for its interface
        assert node.call("DEL", config).exit_code == 0


def test_a_bridge_that_fails_after_it_got_an_address_gives_it_back(node: Node) -> None:
    # The plugin refuses to be the gateway on another network's bridge.
    ip("-n", node.netns.name, "link", "add", "fabric", "type", "bridge")
    ip("-n", node.netns.name, "address", "add", "10.88.0.1/24", "dev", "fabric")
    failed = node.call("ADD", configured("bridge"))
    assert failed.exit_code != 0
    assert "already has an IP address different from" in failed.document["msg"]
    assert node.reserved() == []
