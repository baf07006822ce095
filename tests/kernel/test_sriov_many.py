"""All VFs of two PFs at once, and pods that die at any time."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from tests.kernel import cards, igb
from tests.kernel.cards import Card
from tests.kernel.pods import AT_ONCE, IP, SriovNode, ipam, link_in, link_names, pings, pod, run
from tests.kernel.processes import in_processes

ALL = 7  # of each PF, as igb has them


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Card, Card]]:
    """Both PFs with all their VFs."""
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(igb.with_addressed_vfs(card, ALL)) for card in cards.cards()
        )
        yield first, second


@pytest.fixture(scope="module")
def card(both: tuple[Card, Card]) -> Card:
    """The first of these PFs."""
    return both[0]


def test_all_vfs_of_two_pfs_at_once(sriov: SriovNode, both: tuple[Card, Card]) -> None:
    before = cards.snapshot()
    devices = [vf for card in both for vf in card.vfs]
    configs: list[dict[str, Any]] = [
        {"deviceID": device, "vlan": 100 + number % 3, "trust": "on", "ipam": ipam("10.6.0.0/24")}
        for number, device in enumerate(devices)
    ]
    with ExitStack() as stack:
        names = [stack.enter_context(pod(f"many{number}")) for number in range(len(devices))]
        each = list(zip(names, configs, strict=True))
        adds = [partial(sriov.attach, name, **config) for name, config in each]
        assert in_processes(adds, 1.5 * AT_ONCE) == [0] * len(devices)
        assert len(set(sriov.reservations())) == len(devices)
        for name, config in each:
            link = link_in(name)
            assert link is not None
            assert link.device == config["deviceID"]
            assert cards.setting(str(config["deviceID"]), "trust") is True
        deletes = [partial(sriov.detach, name, **config) for name, config in each]
        assert in_processes(deletes, 1.5 * AT_ONCE) == [0] * len(devices)
    assert cards.snapshot() == before
    assert sriov.leftovers() == []


def test_master_gives_each_of_many_another_vf(sriov: SriovNode, both: tuple[Card, Card]) -> None:
    before = cards.snapshot()
    card = both[0]
    with ExitStack() as stack:
        names = [stack.enter_context(pod(f"many{number}")) for number in range(ALL)]
        adds = [partial(sriov.attach, name, master=card.pf) for name in names]
        assert in_processes(adds, 1.5 * AT_ONCE) == [0] * ALL
        devices = {link.device for name in names if (link := link_in(name)) is not None}
        assert devices == set(card.vfs)
        refused = sriov.call("ADD", "late", names[0], ifname="net2", master=card.pf)
        assert refused.document["code"] == 11, refused
        for name in names:
            sriov.delete(name, name, master=card.pf)
    assert cards.snapshot() == before


@pytest.mark.parametrize("path", ["gone", "empty", "a plain file"])
def test_delete_after_the_namespace_was_killed(sriov: SriovNode, card: Card, path: str) -> None:
    before = cards.snapshot()
    config: dict[str, Any] = {
        "deviceID": card.vfs[0],
        "vlan": 9,
        "mac": "02:ab:cd:00:00:03",
        "mtu": 1300,
    }
    with pod("shortlived") as netns:
        sriov.add("c1", netns, **config)
    netns = {"gone": "shortlived", "empty": "", "a plain file": "/etc/hostname"}[path]
    sriov.delete("c1", netns, **config)
    assert cards.snapshot() == before
    assert sriov.leftovers() == []


def test_namespace_killed_during_add_and_delete(sriov: SriovNode, card: Card) -> None:
    before = cards.snapshot()
    config: dict[str, Any] = {"deviceID": card.vfs[0], "vlan": 9, "ipam": ipam("10.7.0.0/24")}
    for command in ("ADD", "DEL"):
        for delay in (0.0, 0.05, 0.1, 0.2, 0.4):
            with pod("shortlived") as netns:
                if command == "DEL":
                    sriov.add("c1", netns, **config)
                killer = threading.Timer(delay, partial(run, IP, "netns", "delete", netns))
                killer.start()
                sriov.call(command, "c1", netns, **config)
                killer.join()
            sriov.delete("c1", "shortlived", **config)
            assert (command, delay, sriov.leftovers()) == (command, delay, [])
            assert cards.snapshot() == before


def test_vf_that_an_earlier_plugin_left_in_a_dead_pod_is_moved_to_the_host(
    sriov: SriovNode, pods: list[str], card: Card
) -> None:
    """After a failed DEL of sriov-cni before a migration, our journal has no entry for the VF."""
    name = card.netdev(0)
    with pod("old") as netns:
        run(IP, "link", "set", name, "netns", netns, "name", "net1")
        sriov.add("c1", pods[0], deviceID=card.vfs[0])
        assert link_names(netns) == {"lo"}
        sriov.delete("c1", pods[0], deviceID=card.vfs[0])
    assert cards.netdev_of(card.vfs[0])


def test_traffic_between_two_vfs_in_two_pods(
    sriov: SriovNode, pods: list[str], both: tuple[Card, Card]
) -> None:
    sriov.add("c1", pods[0], deviceID=both[0].vfs[0], ipam=ipam("10.8.0.0/24"))
    sriov.add("c2", pods[1], deviceID=both[1].vfs[0], ipam=ipam("10.8.0.0/24"))
    assert pings(pods[0], "10.8.0.2")
    sriov.delete("c1", pods[0], deviceID=both[0].vfs[0])
    sriov.delete("c2", pods[1], deviceID=both[1].vfs[0])
