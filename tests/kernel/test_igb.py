"""The machine's SR-IOV cards: VFs, VLANs, wire, drivers and RDMA work as other tests need."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kernel import cards, igb
from tests.kernel.cards import DEVICES, Card
from tests.kernel.pods import IP, link_names, pings, pod, run
from tests.waiting import until


@pytest.fixture(scope="module")
def machine() -> Iterator[list[Card]]:
    """Both cards, with two VFs each."""
    with ExitStack() as stack:
        yield [stack.enter_context(igb.with_addressed_vfs(card, 2)) for card in cards.cards()]


@pytest.fixture
def reached(machine: list[Card]) -> Iterator[list[str]]:
    """Two pods; the first VF of each card is net1 of a pod, with an address."""
    before = cards.snapshot()
    names = [card.netdev(0) for card in machine]
    with ExitStack() as stack:
        pods = [stack.enter_context(pod(f"reached{number}")) for number in range(2)]
        for number, netns in enumerate(pods):
            run(IP, "link", "set", names[number], "netns", netns, "name", "net1")
            run(IP, "-n", netns, "address", "add", f"10.9.1.{number + 1}/24", "dev", "net1")
            run(IP, "-n", netns, "link", "set", "net1", "up")
        for netns in pods:
            igb.await_carrier("net1", netns)
        yield pods
        for name, netns in zip(names, pods, strict=True):
            run(IP, "-n", netns, "link", "set", "net1", "down")
            run(IP, "-n", netns, "link", "set", "net1", "name", name, "netns", "1")
    assert cards.snapshot() == before


def set_vlan(card: Card, index: int, vlan: int) -> None:
    run(IP, "link", "set", card.pf, "vf", str(index), "vlan", str(vlan))


def test_there_are_two_cards() -> None:
    found = cards.cards()
    assert len(found) == 2
    assert all((DEVICES / card.address / "sriov_totalvfs").read_text() == "7\n" for card in found)


def test_vfs_are_functions_of_their_card(machine: list[Card]) -> None:
    for card in machine:
        for index, vf in enumerate(card.vfs):
            assert (DEVICES / card.address / f"virtfn{index}").resolve().name == vf
            assert (DEVICES / vf / "physfn").resolve().name == card.address
            assert cards.driver_of(vf) == "igbvf"
            netdev = Path("/sys/class/net", card.netdev(index))
            assert netdev.joinpath("address").read_text().strip() == cards.setting(vf, "address")


def test_vlan_is_read_back(machine: list[Card]) -> None:
    before = cards.snapshot()
    card = machine[0]
    run(IP, "link", "set", card.pf, "vf", "1", "vlan", "7", "qos", "3")
    (vlan,) = cards.setting(card.vfs[1], "vlan_list")
    assert (vlan["vlan"], vlan["qos"]) == (7, 3)
    set_vlan(card, 1, 0)
    assert cards.snapshot() == before


def test_vlans_part_the_vfs_of_different_cards(machine: list[Card], reached: list[str]) -> None:
    assert pings(reached[0], "10.9.1.2")
    set_vlan(machine[0], 0, 5)
    assert not pings(reached[0], "10.9.1.2", tries=2)
    set_vlan(machine[1], 0, 5)
    assert pings(reached[0], "10.9.1.2")
    for card in machine:
        set_vlan(card, 0, 0)


def test_vf_comes_back_from_a_deleted_namespace_as_it_was_there(machine: list[Card]) -> None:
    vf, name = machine[0].vfs[0], machine[0].netdev(0)
    with pod("short") as netns:
        run(IP, "link", "set", name, "netns", netns, "name", "net1")
        run(IP, "-n", netns, "link", "set", "net1", "mtu", "1400")
        assert cards.netdev_of(vf) == ""
    assert cards.await_netdev(vf) == "net1"
    assert Path("/sys/class/net/net1/mtu").read_text() == "1400\n"
    run(IP, "link", "set", "net1", "name", name, "mtu", "1500")


def test_vf_goes_to_vfio_and_back(machine: list[Card]) -> None:
    before = cards.snapshot()
    with cards.at_vfio(machine[0].vfs[1]):
        group = (DEVICES / machine[0].vfs[1] / "iommu_group").resolve().name
        assert Path("/dev/vfio", group).is_char_device()
    assert cards.snapshot() == before


def test_zx_hca_of_a_vf_lives_in_a_pod_and_comes_back(machine: list[Card]) -> None:
    vf = machine[0].vfs[0]
    with igb.with_hcas(*machine[0].vfs), igb.exclusive_rdma():
        with pod("exclusive") as netns:
            run(igb.RDMA, "dev", "set", "ibloop0", "netns", netns)
            assert "ibloop0" in run(IP, "netns", "exec", netns, igb.RDMA, "dev")
            assert "ibloop0" not in run(igb.RDMA, "dev")
            assert not list((DEVICES / vf / "infiniband").iterdir())
            assert link_names(netns) == {"lo"}, "its IPoIB interface is made again on the host"
        until(lambda: "ibloop0" in run(igb.RDMA, "dev"))
