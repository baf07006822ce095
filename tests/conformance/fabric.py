"""Helpers for the rows about `ipoib`: its configuration, and reads of the kernel's state."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from base.interrupts import wait_until
from tests.conformance.expect import OK, Added
from tests.conformance.node import Node
from tests.conformance.subject import IPAM, IPOIB
from tests.netns import ip
from tests.waiting import PATIENCE

PARENT, WITNESS = "ib0", "ib1"
KNOBS = Path("/sys/class/infiniband/ibloop0/ibloop")
WITH_IPAM = {"ipam": IPAM.keys["ipam"]}
KEY = "cni.dev/valid-attachments"

Links = dict[str, dict[str, Any]]


def links(netns: Path | None = None) -> Links:
    """Every link of a namespace by its name, as ip(8) shows it in detail."""
    where = ["-netns", netns.name] if netns else []
    return {link["ifname"]: link for link in json.loads(ip(*where, "-json", "-details", "link"))}


def addresses(netns: Path, name: str = "eth0") -> dict[str, dict[str, Any]]:
    """The addresses of global scope of a link."""
    (shown,) = json.loads(ip("-netns", netns.name, "-json", "address", "show", "dev", name))
    return {
        f"{address['local']}/{address['prefixlen']}": address
        for address in shown["addr_info"]
        if address["scope"] == "global"
    }


def routes(netns: Path, family: str = "-4") -> dict[str, dict[str, Any]]:
    """The main table's routes by destination."""
    shown = json.loads(ip("-netns", netns.name, "-json", family, "route"))
    return {route["dst"]: route for route in shown}


_CARRIER = {"LOWER_UP", "NO-CARRIER"}


def host_state() -> dict[str, tuple[object, ...]]:
    """The host's properties that an attachment must not change: names, aliases, state, MTU.

    Carriers are left out: those of an earlier test's devices may appear at any time.
    """
    return {
        name: (link.get("ifalias"), set(link["flags"]) - _CARRIER, link["mtu"], link.get("master"))
        for name, link in links().items()
    }


def strays() -> list[str]:
    return [name for name, link in links().items() if "podfabric:" in link.get("ifalias", "")]


@contextmanager
def unchanged_host() -> Iterator[None]:
    """After the block, the host's links soon equal those before it. (N4, N7)"""
    before = host_state()
    yield
    wait_until(lambda: host_state() == before, PATIENCE)
    after = host_state()
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert not changed, {name: (before.get(name), after.get(name)) for name in changed}


def add(node: Node, netns: Path, config: dict[str, Any], **environ: str | None) -> dict[str, Any]:
    environment = node.environ(**{"CNI_NETNS": str(netns), **environ})
    outcome = node.run(IPOIB, environment, config)
    Added(config.get("cniVersion", "0.1.0")).met_by(outcome)
    return outcome.document


def delete(node: Node, netns: Path, config: dict[str, Any], **environ: str | None) -> None:
    environment = node.environ(**{"CNI_COMMAND": "DEL", "CNI_NETNS": str(netns), **environ})
    OK.met_by(node.run(IPOIB, environment, config))


DUAL = {
    "type": "podfabric-ipam",
    "ipRanges": [
        {"range": "10.9.0.0/24", "gateway": "10.9.0.254"},
        {"range": "fd00:9::/64", "gateway": "fd00:9::fe"},
    ],
    "routes": [{"dst": "0.0.0.0/0"}, {"dst": "10.8.0.0/16", "gw": "10.9.0.253"}],
}
