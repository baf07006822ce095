"""The executables under test: the smallest configuration of each, and its abilities."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ALL_VERSIONS = ("0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")

RANGE = "10.9.0.0/24"
FIRST = "10.9.0.1/24"  # the answer of an ADD while the range is empty


@dataclass(frozen=True)
class Subject:
    """One executable. `adds`: its ADD succeeds on any machine, even without an HCA."""

    name: str
    about: str
    adds: bool
    keys: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def config(self, **changes: object) -> dict[str, Any]:
        """The minimal configuration, S0 of the tables, with changes; `None` removes a key."""
        least = {"cniVersion": "1.0.0", "name": "n1", "type": self.name}
        config: dict[str, Any] = {**least, **self.keys, **changes}
        return {key: value for key, value in config.items() if value is not None}


NOOP = Subject("noop", "noop: answers what the test says", adds=True)
IPAM = Subject(
    "podfabric-ipam",
    "podfabric-ipam: gives pods addresses from ranges, kept on this node",
    adds=True,
    keys={"type": "x", "ipam": {"type": "podfabric-ipam", "range": RANGE}},
)
IPOIB = Subject(
    "ipoib",
    "podfabric ipoib: gives a pod an IP-over-InfiniBand interface",
    adds=False,
    keys={"master": "ib0"},
)

SRIOV = Subject(
    "sriov",
    "podfabric sriov: moves an SR-IOV virtual function into a pod",
    adds=False,
    keys={"deviceID": "0000:ff:1f.7"},
)

RDMA = Subject(
    "rdma",
    "podfabric rdma: gives a pod the RDMA device of the VF that sriov gave it",
    adds=False,
)
"""Works behind `sriov` only, so the tables' S0 is not a configuration for it."""

EVERY = (NOOP, IPAM, IPOIB, SRIOV)
OURS = (IPAM, IPOIB, SRIOV)
ADDING = tuple(subject for subject in EVERY if subject.adds)
