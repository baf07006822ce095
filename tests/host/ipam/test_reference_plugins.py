"""The reference interface plugins (Go) as callers of podfabric-ipam, in each CNI version."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.host.ipam.reference_node import Node, addresses
from tests.netns import ip, namespace
from tests.runtime import CNI_BIN, REFERENCE_PLUGINS

VERSIONS = ("0.3.1", "0.4.0", "1.0.0")
ADDRESSES = {"range": "10.77.0.0/24", "gateway": "10.77.0.1"}
PARENT = "parent0"
EXHAUSTED = "no free address in "
PLUGINS: dict[str, dict[str, Any]] = {
    "bridge": {"type": "bridge", "bridge": "fabric", "isGateway": True},
    "macvlan": {"type": "macvlan", "master": PARENT},
}


def configured(plugin: str, version: str = "1.0.0", **ipam: object) -> dict[str, Any]:
    """A network of that interface plugin; `ipam` are options of podfabric-ipam."""
    options = {"type": "podfabric-ipam", **(ipam or ADDRESSES)}
    return {"cniVersion": version, "name": "fabric", **PLUGINS[plugin], "ipam": options}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A fresh node, with the reference plugins and podfabric-ipam under its two names."""
    plugins = tmp_path / "bin"
    plugins.mkdir()
    for executable in (
        *(REFERENCE_PLUGINS / name for name in ("bridge", "host-device", "macvlan")),
        *(CNI_BIN / name for name in ("podfabric-ipam", "whereabouts")),
    ):
        assert executable.exists(), f"{executable} is missing: make cni"
        (plugins / executable.name).symlink_to(executable)
    with namespace() as netns:
        yield Node(tmp_path, plugins, netns)


@pytest.fixture
def pod() -> Iterator[Path]:
    """A network namespace for a pod."""
    with namespace() as netns:
        yield netns


@pytest.fixture
def other_pod() -> Iterator[Path]:
    """A network namespace for another pod."""
    with namespace() as netns:
        yield netns


@pytest.fixture(autouse=True)
def parent(node: Node) -> None:
    """An interface as the parent of macvlan."""
    ip("-n", node.netns.name, "link", "add", PARENT, "type", "veth", "peer", "name", "parent1")
    for name in (PARENT, "parent1"):
        ip("-n", node.netns.name, "link", "set", name, "up")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_an_attachment_lives_from_add_to_del(
    node: Node, pod: Path, plugin: str, version: str
) -> None:
    config = configured(plugin, version)
    added = node.call("ADD", config, pod)
    assert added.exit_code == 0, added.stdout
    result = added.document
    assert result["cniVersion"] == version
    [address] = result["ips"]
    assert (address["address"], address["gateway"]) == ("10.77.0.2/24", "10.77.0.1")
    assert addresses(pod) == ["10.77.0.2/24"]
    assert node.reserved(pod) == ["10.77.0.2"]
    if version != "0.3.1":  # that version has no CHECK
        checked = node.call("CHECK", config, pod, result)
        assert (checked.exit_code, checked.stdout) == (0, "")
    deleted = node.call("DEL", config, pod, result)
    assert (deleted.exit_code, deleted.stdout) == (0, "")
    assert addresses(pod) == []
    assert node.reservations() == []
    assert node.call("DEL", config, pod).exit_code == 0


@pytest.mark.parametrize("plugin", [*PLUGINS, "host-device"])
def test_a_definition_of_whereabouts_gets_addresses_of_podfabric(
    node: Node, pod: Path, plugin: str
) -> None:
    keys = PLUGINS.get(plugin, {"type": plugin, "device": PARENT})
    config = {**configured("bridge"), **keys, "ipam": {"type": "whereabouts", **ADDRESSES}}
    added = node.call("ADD", config, pod)
    assert added.exit_code == 0, added.stdout
    assert addresses(pod) == ["10.77.0.2/24"]
    assert node.reserved(pod) == ["10.77.0.2"]
    checked = node.call("CHECK", config, pod, added.document)
    assert (checked.exit_code, checked.stdout) == (0, "")
    deleted = node.call("DEL", config, pod, added.document)
    assert (deleted.exit_code, deleted.stdout) == (0, "")
    assert addresses(pod) == []
    assert node.reservations() == []


@pytest.mark.parametrize(
    ("plugin", "version"), [*(("bridge", version) for version in VERSIONS), ("macvlan", "1.0.0")]
)
def test_an_exhausted_range_leaves_no_reservation_and_no_address(
    node: Node, pod: Path, other_pod: Path, plugin: str, version: str
) -> None:
    config = configured(plugin, version, range="10.77.0.0/30", gateway="10.77.0.1")
    assert node.call("ADD", config, pod).exit_code == 0
    refused = node.call("ADD", config, other_pod)
    assert refused.exit_code != 0
    assert EXHAUSTED in refused.document["msg"]
    assert refused.document["code"] == 110
    assert node.reserved(other_pod) == []
    assert addresses(other_pod) == []
    assert node.reserved(pod) == ["10.77.0.2"]


def test_a_bridge_that_fails_after_it_got_an_address_gives_it_back(node: Node, pod: Path) -> None:
    # It refuses to be the gateway on the bridge of another network.
    ip("-n", node.netns.name, "link", "add", "fabric", "type", "bridge")
    ip("-n", node.netns.name, "address", "add", "10.88.0.1/24", "dev", "fabric")
    failed = node.call("ADD", configured("bridge"), pod)
    assert failed.exit_code != 0
    assert "already has an IP address different from" in failed.document["msg"]
    assert node.reservations() == []
