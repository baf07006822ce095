"""What the rows about `ipoib` share: its configuration, and the kernel's word on what is there."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from base.waiting import wait_until
from tests.conformance.expect import OK, Added
from tests.conformance.node import Node, ip
from tests.conformance.subject import IPAM, IPOIB
from tests.waiting import PATIENCE

PARENT, WITNESS = "ib0", "ib1"
KNOBS = Path("/sys/class/infiniband/ibloop0/ibloop")
WITH_IPAM = {"ipam": IPAM.keys["ipam"]}
KEY = "cni.dev/valid-attachments"

Links = dict[str, dict[str, Any]]


def links(netns: Path | None = None) -> Links:
    """Every link of a namespace by its name, as ip(8) shows it in detail."""
    where = ["-netns", netns.name] if netns else []
    return {one["ifname"]: one for one in json.loads(ip(*where, "-json", "-details", "link"))}


def addresses(netns: Path, name: str = "eth0") -> dict[str, dict[str, Any]]:
    """The addresses of global scope of a link."""
    (shown,) = json.loads(ip("-netns", netns.name, "-json", "address", "show", "dev", name))
    return {
        f"{one['local']}/{one['prefixlen']}": one
        for one in shown["addr_info"]
        if one["scope"] == "global"
    }


def routes(netns: Path, family: str = "-4") -> dict[str, dict[str, Any]]:
    """The main table's routes by destination."""
    shown = json.loads(ip("-netns", netns.name, "-json", family, "route"))
    return {one["dst"]: one for one in shown}


_CARRIER = {"LOWER_UP", "NO-CARRIER"}


def host_state() -> dict[str, tuple[object, ...]]:
    """What an attachment must leave of the host as it was: names, aliases, state, MTU.

    Carriers are left out: those of what a test before had plugged in come when they come.
    """
    return {
        name: (one.get("ifalias"), set(one["flags"]) - _CARRIER, one["mtu"], one.get("master"))
        for name, one in links().items()
    }


def strays() -> list[str]:
    return [name for name, one in links().items() if "podfabric:" in one.get("ifalias", "")]


@contextmanager
def unchanged_host() -> Iterator[None]:
    """The block leaves the host's links as they were, at the latest after a while. (N4, N7)"""
    before = host_state()
    yield
    wait_until(lambda: host_state() == before, PATIENCE)
    after = host_state()
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert not changed, {name: (before.get(name), after.get(name)) for name in changed}


def add(node: Node, netns: Path, config: dict[str, Any], **environ: str | None) -> dict[str, Any]:
    given = node.environ(**{"CNI_NETNS": str(netns), **environ})
    outcome = node.run(IPOIB, given, config)
    Added(config.get("cniVersion", "0.1.0")).met_by(outcome)
    return outcome.document


def delete(node: Node, netns: Path, config: dict[str, Any], **environ: str | None) -> None:
    given = node.environ(**{"CNI_COMMAND": "DEL", "CNI_NETNS": str(netns), **environ})
    OK.met_by(node.run(IPOIB, given, config))


DUAL = {
    "type": "podfabric-ipam",
    "ipRanges": [
        {"range": "10.9.0.0/24", "gateway": "10.9.0.254"},
        {"range": "fd00:9::/64", "gateway": "fd00:9::fe"},
    ],
    "routes": [{"dst": "0.0.0.0/0"}, {"dst": "10.8.0.0/16", "gw": "10.9.0.253"}],
}
