"""RDMA devices of VFs move to the pod in exclusive mode, and back."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent.observe import pod_counters
from tests.kernel import cards, igb
from tests.kernel.cards import Card
from tests.kernel.igb import RDMA
from tests.kernel.pods import IP, RdmaNode, SriovNode, link_in, link_names, pod, run
from tests.kernel.processes import killed_at
from tests.waiting import until


@pytest.fixture(scope="module")
def isolated(card: Card) -> Iterator[Card]:
    """Exclusive mode, and an HCA on each of two VFs: one next to igbvf, and one in its place."""
    igb.unbind(card.vfs[1])
    with igb.with_hcas(card.vfs[0], card.vfs[1]), igb.exclusive_rdma():
        yield card
    igb.bind(card.vfs[1], "igbvf")


def devices_in(netns: str) -> list[str]:
    """The RDMA devices in a pod."""
    shown = run(IP, "netns", "exec", netns, RDMA, "dev")
    return [line.split()[1].rstrip(":") for line in shown.splitlines()]


def uverbs(address: str) -> list[str]:
    """The uverbs devices of a function, which the kernel shows in every namespace."""
    return sorted(path.name for path in (cards.DEVICES / address / "infiniband_verbs").iterdir())


@pytest.mark.parametrize("which", [0, 1], ids=["Ethernet", "InfiniBand"])
def test_rdma_device_moves_with_the_interface_and_returns(
    sriov: SriovNode, isolated: Card, which: int
) -> None:
    before, vf = cards.snapshot(), isolated.vfs[which]
    numbers = uverbs(vf)
    config: dict[str, Any] = {"deviceID": vf, "rdmaIsolation": True}
    with pod("isolated") as netns:
        reply = sriov.add("c1", netns, **config)
        assert devices_in(netns) == [f"ibloop{which}"]
        assert f"ibloop{which}" not in run(RDMA, "dev")
        link = link_in(netns)
        assert link is not None
        assert link.link_type_name == ("ether", "infiniband")[which]
        assert uverbs(vf) == numbers
        checked = sriov.call("CHECK", "c1", netns, previous=reply, **config)
        assert checked.exit_code == 0, checked
        sriov.delete("c1", netns, **config)
    assert settled() == settled(before)
    assert uverbs(vf) == numbers
    assert sriov.leftovers() == []


def test_counters_of_a_port_in_a_pod_are_scraped(sriov: SriovNode, isolated: Card) -> None:
    config: dict[str, Any] = {"deviceID": isolated.vfs[0], "rdmaIsolation": True}

    def scraped() -> tuple[dict[str, float], float]:
        """The counters of ibloop0, by the kernel's name, and the number of unreadable ports."""
        counters, unreadable = pod_counters.families(sriov.paths)
        assert {each.labels["device"] for each in counters.samples} <= {"ibloop0"}
        return (
            {each.labels["counter"]: each.value for each in counters.samples},
            unreadable.samples[0].value,
        )

    with pod("isolated") as netns:
        sriov.add("c1", netns, **config)
        counters, unreadable = scraped()
        assert set(counters) == {"sent_pkts", "rcvd_pkts", "sent_bytes", "rcvd_bytes"}
        assert unreadable == 0
    assert scraped() == ({}, 1)  # the namespace is gone, and the sweep has not run
    sriov.delete("c1", "isolated", **config)
    assert scraped() == ({}, 0)


@pytest.mark.parametrize("which", [0, 1], ids=["Ethernet", "InfiniBand"])
def test_hole_r1_rdma_device_comes_home_from_a_namespace_that_is_gone(
    sriov: SriovNode, isolated: Card, which: int
) -> None:
    before, vf = cards.snapshot(), isolated.vfs[which]
    config: dict[str, Any] = {"deviceID": vf, "rdmaIsolation": True}
    with pod("isolated") as netns:
        sriov.add("c1", netns, **config)
    sriov.delete("c1", "isolated", **config)
    assert settled() == settled(before)
    assert sriov.leftovers() == []


def test_rdma_device_renamed_in_the_pod_comes_home_under_its_name(
    sriov: SriovNode, isolated: Card
) -> None:
    before, vf = cards.snapshot(), isolated.vfs[0]
    config: dict[str, Any] = {"deviceID": vf, "rdmaIsolation": True}
    for gone in (False, True):
        with pod("isolated") as netns:
            sriov.add("c1", netns, **config)
            run(IP, "netns", "exec", netns, RDMA, "dev", "set", "ibloop0", "name", "mine0")
            if not gone:
                sriov.delete("c1", netns, **config)
        if gone:
            sriov.delete("c1", "isolated", **config)
        assert settled() == settled(before)


def test_rdma_device_that_left_the_pod_is_found_by_check(sriov: SriovNode, isolated: Card) -> None:
    config: dict[str, Any] = {"deviceID": isolated.vfs[0], "rdmaIsolation": True}
    with pod("isolated") as netns:
        reply = sriov.add("c1", netns, **config)
        inside = [IP, "netns", "exec", netns, RDMA, "dev", "set", "ibloop0", "netns"]
        with pod("other") as other:
            run(*inside, other)
            checked = sriov.call("CHECK", "c1", netns, previous=reply, **config)
            assert checked.document["code"] == 102, checked
            assert "RDMA device ibloop0" in checked.text
        until(lambda: "ibloop0" in run(RDMA, "dev"))
        sriov.delete("c1", netns, **config)
    assert sriov.leftovers() == []


@pytest.mark.parametrize("gone", [False, True], ids=["alive", "gone"])
def test_chain_with_rdma_gives_the_same_result(
    sriov: SriovNode, isolated: Card, tmp_path: Path, gone: bool
) -> None:
    """Definitions for sriov-cni and rdma-cni: DEL runs in reverse, and nothing blocks it (R1)."""
    chained = RdmaNode(tmp_path)
    before, vf = cards.snapshot(), isolated.vfs[0]
    with pod("isolated") as netns:
        first = sriov.add("c1", netns, deviceID=vf)
        assert devices_in(netns) == []
        second = chained.add("c1", netns, deviceID=vf, previous=first)
        assert second == first
        assert devices_in(netns) == ["ibloop0"]
        assert chained.add("c1", netns, deviceID=vf, previous=first) == first  # a second time
        for node in (sriov, chained):
            checked = node.call("CHECK", "c1", netns, deviceID=vf, previous=first)
            assert checked.exit_code == 0, checked
        if not gone:
            chained.delete("c1", netns, deviceID=vf)
            sriov.delete("c1", netns, deviceID=vf)
    if gone:
        chained.delete("c1", "isolated", deviceID=vf)
        sriov.delete("c1", "isolated", deviceID=vf)
    assert settled() == settled(before)
    assert sriov.leftovers() == []


@pytest.mark.parametrize("again", [True, False], ids=["added again", "deleted"])
def test_chain_with_rdma_killed_at_every_step(
    sriov: SriovNode, isolated: Card, tmp_path: Path, again: bool
) -> None:
    """Then another ADD moves the device, or the DEL of `sriov` restores it."""
    chained, vf = RdmaNode(tmp_path), isolated.vfs[0]
    before = cards.snapshot()
    with pod("isolated") as netns:
        for step in range(1, 100):
            first = sriov.add("c1", netns, deviceID=vf)
            call = partial(chained.call, "ADD", "c1", netns, deviceID=vf, previous=first)
            killed = killed_at(step, call)
            if again:
                assert chained.add("c1", netns, deviceID=vf, previous=first) == first
                assert (step, devices_in(netns)) == (step, ["ibloop0"])
                assert chained.call("CHECK", "c1", netns, previous=first).exit_code == 0
            sriov.delete("c1", netns, deviceID=vf)
            assert (step, sriov.leftovers()) == (step, [])
            assert (step, settled()) == (step, settled(before))
            if not killed:
                break
        assert not killed
        assert step > 3, "the injection counts no changes"


def test_chain_with_rdma_is_refused_for_infiniband_with_what_to_set(
    sriov: SriovNode, isolated: Card, tmp_path: Path
) -> None:
    config: dict[str, Any] = {"deviceID": isolated.vfs[1]}
    with pod("isolated") as netns:
        first = sriov.add("c1", netns, **config)
        refused = RdmaNode(tmp_path).call("ADD", "c1", netns, previous=first, **config)
        assert (refused.document["code"], '"rdmaIsolation": true' in refused.text) == (7, True)
        other = {"deviceID": isolated.vfs[0]}
        refused = RdmaNode(tmp_path).call("ADD", "c1", netns, previous=first, **other)
        assert "of this attachment: remove" in refused.text
        sriov.delete("c1", netns, **config)
    assert sriov.leftovers() == []


def test_device_without_an_rdma_device_cannot_be_isolated(sriov: SriovNode, isolated: Card) -> None:
    with pod("isolated") as netns:
        reply = sriov.refused("c1", netns, deviceID=isolated.vfs[2], rdmaIsolation=True)
        assert "has no RDMA device" in reply.text


def test_failure_after_the_move_brings_all_of_it_home(sriov: SriovNode, isolated: Card) -> None:
    """The kernel refuses the MTU after the RDMA device has moved."""
    before = cards.snapshot()
    config: dict[str, Any] = {"deviceID": isolated.vfs[1], "rdmaIsolation": True, "mtu": 65000}
    with pod("isolated") as netns:
        reply = sriov.call("ADD", "c1", netns, **config)
        assert reply.exit_code == 1, reply
        assert devices_in(netns) == []
        assert link_names(netns) == {"lo"}
    assert settled() == settled(before)
    assert sriov.leftovers() == []


def settled(snapshot: dict[str, str] | None = None) -> dict[str, str]:
    """A snapshot without the values that every move of an RDMA device changes.

    The IPoIB interface is recreated, with another queue pair in its address.
    """
    found = cards.snapshot() if snapshot is None else snapshot
    return {
        key: value
        for key, value in found.items()
        if not (key.startswith("ib") and key.endswith((" address", " broadcast")))
    }
