"""Health: a fault counts soon, its end only once it lasted, and longer after every fault."""

import msgspec
import pytest

from deviceplugin.health import LONGEST_SETTLE, NOTICE, SETTLE, Health
from host.sysfs.discovery import HCA, CharacterDevice, Port, RdmaDevice

CARD = "0000:3b:00.0"


def port(**fields: object) -> Port:
    usual = {
        "number": 1,
        "link_layer": "InfiniBand",
        "state": "ACTIVE",
        "physical_state": "LinkUp",
        "rate": "400 Gb/sec (4X NDR)",
        "guid": "",
        "pkeys": (0xFFFF,),
        "netdevs": (),
        "umad": None,
        "issm": None,
    }
    return msgspec.convert(usual | fields, Port)


UVERBS = CharacterDevice("uverbs0", 231, 192)
DOWN = port(state="DOWN", physical_state="Polling")


def hca(*ports: Port) -> HCA:
    rdma = RdmaDevice(name="mlx5_0", uverbs=UVERBS, ports=ports)
    return HCA(
        id=CARD,
        address=CARD,
        vendor="15b3",
        device="1021",
        driver="mlx5_core",
        numa=0,
        rdma=(rdma,),
        rdma_names=("mlx5_0",),
    )


class Clock:
    """Observes one HCA at times of the test's choice."""

    def __init__(self, first: HCA) -> None:
        self.health = Health()
        self.now = 1000.0
        self.see(first)

    def see(self, *seen: HCA, after: float = 0.0) -> bool:
        self.now += after
        self.health.observe(seen, [CARD], self.now)
        return not self.health.reports()[CARD]


@pytest.mark.parametrize(
    ("seen", "fault"),
    [
        (hca(port()), None),
        (hca(DOWN), "port 1 of mlx5_0 is DOWN (Polling)"),
        (hca(port(state="INIT")), "port 1 of mlx5_0 is INIT (LinkUp)"),
        (hca(DOWN, port(number=2)), None),  # one port of two is enough
        (hca(), "mlx5_0 has no port"),
        (msgspec.structs.replace(hca(), rdma=()), None),  # it is in a pod
    ],
)
def test_what_is_first_seen_is_believed(seen: HCA, fault: str | None) -> None:
    assert Clock(seen).health.reports()[CARD] == fault


def test_fault_counts_once_it_lasts() -> None:
    clock = Clock(hca(port()))
    assert clock.see(hca(DOWN), after=1.0)
    assert clock.health.pending
    assert clock.see(hca(DOWN), after=NOTICE / 2)
    assert not clock.see(hca(DOWN), after=NOTICE / 2)
    assert not clock.health.pending


def test_flicker_is_not_told() -> None:
    clock = Clock(hca(port()))
    for _ in range(10):
        assert clock.see(hca(DOWN), after=NOTICE / 2)
        assert clock.see(hca(port()), after=NOTICE / 2)


def test_end_of_a_fault_counts_once_it_lasts() -> None:
    clock = Clock(hca(DOWN))
    assert not clock.see(hca(port()), after=1.0)
    assert not clock.see(hca(port()), after=SETTLE * 0.9)
    assert clock.see(hca(port()), after=SETTLE * 0.2)


def test_every_fault_makes_the_next_end_take_longer_up_to_a_limit() -> None:
    clock = Clock(hca(port()))
    waits = []
    for _ in range(8):
        clock.see(hca(DOWN), after=0.1)
        assert not clock.see(hca(DOWN), after=NOTICE)
        clock.see(hca(port()), after=0.1)
        began = clock.now
        while not clock.see(hca(port()), after=0.5):
            assert clock.now < began + 2 * LONGEST_SETTLE
        waits.append(clock.now - began)
    assert waits[0] == SETTLE
    assert waits[1] == 2 * SETTLE
    assert waits == sorted(waits)
    assert waits[-1] == LONGEST_SETTLE


def test_listed_hca_that_is_gone_is_unhealthy_and_one_that_is_not_listed_is_forgotten() -> None:
    clock = Clock(hca(port()))
    clock.see(after=1.0)
    assert not clock.see(after=NOTICE)
    assert clock.health.reports()[CARD] == "it is gone from this node"
    clock.health.observe([], [], clock.now)
    assert clock.health.reports() == {}


def test_rate_of_another_hca_that_took_the_name_is_no_measure() -> None:
    clock = Clock(hca(port()))
    slow = msgspec.structs.replace(hca(port(rate="25 Gb/sec (1X EDR)")), id="0000:af:00.0")
    for _ in range(20):
        clock.health.observe([slow], [slow.id], clock.now)
        clock.now += 1.0
    assert clock.health.reports()[slow.id] is None
