"""The orders that a pod of `podfabric check` gets, and the report that the pod writes.

A pod tests the next pods of its network in a ring, so each pod is also tested. A pod also looks for
pods of the other network, which must not answer.
"""

from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

VARIABLE = "FABRIC_CHECK_ORDERS"  # of a pod, with its orders in JSON
PORT = 18514  # TCP and UDP; transfers use the ports above
MOST_RAILS = 16
MOST_PEERS = 8
MOST_REPORT = 3800  # bytes; the kubelet reads 4096 of a termination message
MOST_WHY = 160  # characters of a reason

START, ADDRESS, MTU = "start", "address", "mtu"
PKEY, VERBS, ISOLATION = "pkey", "verbs", "isolation"


class Rail(msgspec.Struct, frozen=True):
    """An interface of a pod on the tested network."""

    interface: str
    address: str
    mac: str = ""


class Neighbour(msgspec.Struct, frozen=True):
    """Another pod. `distance` is its place behind this pod in the ring."""

    pod: str
    rails: tuple[Rail, ...]
    distance: int = 0


class Times(msgspec.Struct, frozen=True):
    """Seconds after the pod's start: peers may start, partitions are watched, the pod ends."""

    patience: float = 40
    watch: float = 30
    end: float = 80


class Orders(msgspec.Struct, frozen=True):
    """The tasks of a pod. `incoming` pods test this pod. `foreign` pods must not answer."""

    run: str
    pod: str
    rails: tuple[Rail, ...]
    peers: tuple[Neighbour, ...] = ()
    incoming: int = 0
    foreign: tuple[Neighbour, ...] = ()
    verbs: bool = False
    times: Times = Times()


class RailFacts(msgspec.Struct, frozen=True):
    """An interface, as the pod sees it. `pkey` is "" for Ethernet, `device` "" without an HCA."""

    interface: str
    address: str
    mtu: int = 0
    pkey: str = ""
    device: str = ""


class FailedTest(msgspec.Struct, frozen=True):
    """A test that failed. `pod` is the other pod, or the pod itself."""

    pod: str
    test: str
    why: str


class PodReport(msgspec.Struct, frozen=True):
    """`more` failed tests did not fit."""

    rails: tuple[RailFacts, ...]
    failed: tuple[FailedTest, ...] = ()
    more: int = 0


def transfer_port(distance: int, rail: int) -> int:
    """The TCP port of a transfer: another one for each pod that tests the same pod."""
    return PORT + 1 + (distance - 1) * MOST_RAILS + rail


def orders(
    run: str, rings: Sequence[Sequence[Neighbour]], peers: int, *, verbs: bool
) -> Iterator[Orders]:
    """The orders of the pods of one network, or of two networks that must be separate."""
    for number, ring in enumerate(rings):
        others = rings[1 - number] if len(rings) == 2 else ()
        incoming = min(peers, len(ring) - 1)  # a pod does not test itself
        for place, pod in enumerate(ring):
            behind = (ring[(place + step) % len(ring)] for step in range(1, incoming + 1))
            yield Orders(
                run,
                pod.pod,
                pod.rails,
                tuple(replace(each, distance=n) for n, each in enumerate(behind, 1)),
                incoming,
                tuple(others[(place + n) % len(others)] for n in range(min(peers, len(others)))),
                verbs,
            )


def encoded(report: PodReport) -> bytes:
    """The report in at most MOST_REPORT bytes."""
    while len(found := msgspec.json.encode(report)) > MOST_REPORT:
        kept = report.failed[: len(report.failed) * 3 // 4]
        left = report.more + len(report.failed) - len(kept)
        report = replace(report, failed=kept, more=left)
    return found
