"""Mistakes in config.yaml: the agent serves the unaffected parts and reports the mistakes."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.attacks.agent_clients import Caller, network
from tests.plugins.service import Service
from tests.unix_http import UnixHTTPConnection
from tests.waiting import PATIENCE, until

IPAM = "podfabric-ipam"
CONFIG = network("net", IPAM, ipam={"type": IPAM, "range": "10.7.0.0/29"})
ON_LINK = network("net", "ipoib", master="none0", ipam={"type": IPAM, "range": "10.7.0.0/29"})


class Node(Caller):
    @property
    def config(self) -> Path:
        return self.service.root / "etc/config.yaml"

    def write(self, **sections: Any) -> None:  # noqa: ANN401 - any JSON value
        listen = {"agent": {"listen": f"unix:{self.service.root}/http"}}
        new = self.config.with_name(".new")
        new.write_bytes(msgspec.json.encode({**listen, **sections}))
        new.replace(self.config)

    def add(self, plugin: str, config: bytes) -> tuple[int, str]:
        """The CNI code and the message of an ADD."""
        reply = self.ask(plugin, "ADD", "c1", config)
        answer = msgspec.json.decode(reply.stdout)
        return (answer["code"], answer["msg"]) if reply.exit_code else (0, "")

    def wrong(self) -> set[str]:
        """The sections with a mistake, from a scrape."""
        connection = UnixHTTPConnection(self.service.root / "http")
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        except OSError:  # it does not listen yet
            return set()
        finally:
            connection.close()
        found = re.findall(r'^podfabric_configuration_error{section="(\w+)"} 1', text, re.M)
        return set(found)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node whose agent starts with a mistake in each section except `agent`."""
    (tmp_path / "kubelet/device-plugins").mkdir(parents=True)
    (tmp_path / "etc").mkdir()
    made = Node.__new__(Node)
    made.service = Service.__new__(Service)
    made.service.root = tmp_path
    made.write(policy={"rulez": []}, ipam={"scope": "all"}, pools=[{"name": "x"}])
    environ = {f"PODFABRIC_{key}": f"{tmp_path}/{key.lower()}" for key in ("KUBELET", "CDI")}
    command = [str(Path(sys.executable).with_name("podfabric")), "agent"]
    service = Service(tmp_path, environ=environ, command=command)
    service.wait_until_ready()
    yield Node(service, tmp_path / "bin", tmp_path / "state")
    service.process.kill()
    service.process.wait()


def test_mistakes_stop_their_sections_alone_until_they_are_corrected(node: Node) -> None:
    until(lambda: node.wrong() == {"policy", "ipam", "pools"})
    for plugin, config in ((IPAM, CONFIG), ("ipoib", ON_LINK)):
        code, text = node.add(plugin, config)
        assert (code, "policy.rulez: unknown key" in text) == (5, True), text
    assert node.ask(IPAM, "DEL", "c1", CONFIG).exit_code == 0
    assert node.ask("ipoib", "DEL", "c1", ON_LINK).exit_code == 0

    node.write(policy={"set": {"pfOnly": [True]}}, ipam={"scope": "all"}, pools=[])
    until(lambda: node.wrong() == {"ipam"})
    assert "open netns" in node.add("ipoib", ON_LINK)[1]
    code, text = node.add(IPAM, CONFIG)
    assert (code, "ipam.scope: " in text) == (5, True), text

    node.write(policy={"whole_pf": True}, ipam={"scope": "all"}, pools=[])
    until(lambda: node.wrong() == {"policy", "ipam"})
    assert "open netns" in node.add("ipoib", ON_LINK)[1]  # by the earlier rules

    node.write(ipam={"scope": "node"}, pools=[])
    assert node.service.process.wait(PATIENCE) == 0
