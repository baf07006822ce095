"""Every list of a configuration, with its limit."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cni.spec import limits
from tests.attacks.agent_clients import network

RANGE = "10.9.0.0/16"


def v4(number: int) -> str:
    return f"10.9.{number >> 8 & 255}.{number & 255}"


def v6(number: int) -> str:
    return f"fd00::{number >> 16:x}:{number & 0xFFFF:x}"


def ipam(**keys: object) -> dict[str, Any]:
    return {"ipam": {"type": "podfabric-ipam", **keys}}


def ranged(**keys: object) -> dict[str, Any]:
    return ipam(range=RANGE, **keys)


@dataclass(frozen=True)
class List:
    """A list of a configuration: `entry` makes one entry, `config` the keys that hold the list."""

    key: str
    plugin: str
    config: Callable[[list[Any]], dict[str, Any]]
    entry: Callable[[int], object]
    limit: int
    verbs: tuple[str, ...] = ("ADD", "STATUS")
    code: int = 7

    def __str__(self) -> str:
        return f"{self.plugin}-{self.key}"

    def of(self, entries: int) -> bytes:
        listed = [self.entry(number) for number in range(entries)]
        return network("attack", self.plugin, **self.config(listed))

    @property
    def widest(self) -> int:
        """The number of entries that the limit of values allows."""
        entry = json.dumps(self.entry(1))
        values = 1 + sum(entry.count(character) for character in ",[{")
        return (limits.MAX_VALUES - 100) // values

    @property
    def largest(self) -> int:
        """The number of entries that fit into 1 MiB."""
        return (limits.MAX_BYTES - 1000) // (len(json.dumps(self.entry(100_000))) + 2)


def previous(**keys: object) -> dict[str, Any]:
    return {"prevResult": {"cniVersion": "1.1.0", **keys}, **ranged()}


def prefixed(number: int) -> str:
    return f"{v6(number)}/64"


IPAM, CHECK = "podfabric-ipam", ("CHECK",)
SUBNET = {"range": "10.9.0.0/16"}
LISTS = [
    List("addresses", IPAM, lambda of: ipam(addresses=of), lambda n: {"address": prefixed(n)}, 64),
    List("ipRanges", IPAM, lambda of: ipam(ipRanges=of), lambda n: {"range": prefixed(n)}, 64),
    List("ranges", IPAM, lambda of: ipam(ranges=of), lambda n: [{"subnet": prefixed(n)}], 64),
    List("ranges[0]", IPAM, lambda of: ipam(ranges=[of]), lambda n: {"subnet": prefixed(n)}, 256),
    List("exclude", IPAM, lambda of: ranged(exclude=of), v4, 1024),
    List(
        "ipRanges[0].exclude",
        IPAM,
        lambda of: ipam(ipRanges=[{**SUBNET, "exclude": of}]),
        v4,
        1024,
    ),
    List(
        "].exclude",
        IPAM,
        lambda of: ipam(ipRanges=[{**SUBNET, "exclude": of[i::2]} for i in (0, 1)]),
        lambda n: v4(n // 2),
        1024,
    ),
    List("routes", IPAM, lambda of: ranged(routes=of), lambda n: {"dst": prefixed(n)}, 256),
    *(
        List(f"dns.{key}", IPAM, lambda of, key=key: ranged(dns={key: of}), v4, 64)  # type: ignore[misc]
        for key in ("nameservers", "search", "options")
    ),
    List("runtimeConfig.ips", IPAM, lambda of: ranged() | {"runtimeConfig": {"ips": of}}, v4, 64),
    List("args.cni.ips", IPAM, lambda of: ranged() | {"args": {"cni": {"ips": of}}}, v4, 64),
    List(
        "runtimeConfig.ipRanges",
        IPAM,
        lambda of: ranged() | {"runtimeConfig": {"ipRanges": of}},
        lambda n: [{"subnet": prefixed(n)}],
        64,
    ),
    List(
        "ips", IPAM, lambda of: previous(ips=of), lambda n: {"address": prefixed(n)}, 256, CHECK, 6
    ),
    List(
        "routes",
        IPAM,
        lambda of: previous(routes=of),
        lambda n: {"dst": prefixed(n)},
        256,
        CHECK,
        6,
    ),
    List(
        "interfaces",
        IPAM,
        lambda of: previous(interfaces=of),
        lambda n: {"name": v4(n)},
        256,
        CHECK,
        6,
    ),
    List("master", "ipoib", lambda of: {"master": of}, lambda n: f"ib{n}", 64, ("ADD", "CHECK")),
    List("master", "sriov", lambda of: {"master": of}, lambda n: f"ens{n}", 64, ("ADD", "CHECK")),
    List(
        "dns.search", "ipoib", lambda of: {"master": "ib0", "dns": {"search": of}}, v4, 64, ("ADD",)
    ),
    List(
        "dns.search", "sriov", lambda of: {"master": "ib0", "dns": {"search": of}}, v4, 64, ("ADD",)
    ),
]
