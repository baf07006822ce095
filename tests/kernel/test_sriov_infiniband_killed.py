"""kill -9 before every change of ADD and DEL on an InfiniBand VF; afterwards it is as before."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.kernel import cards, igb
from tests.kernel import infiniband_vfs as ib
from tests.kernel.cards import Card
from tests.kernel.pods import SriovNode, link_in, pod
from tests.kernel.processes import killed_at

GUID = "02:00:00:00:00:00:00:ab"
OTHER_GUID = "02:00:00:00:00:00:00:cd"
MORE_THAN_ENOUGH = 300  # changes; an ADD makes fewer


@pytest.fixture(scope="module")
def hca() -> Iterator[Card]:
    """A PF with one VF, to which it has given GUIDs; RDMA devices are in one namespace each."""
    with ib.with_infiniband_vfs(1) as card, igb.exclusive_rdma():
        ib.set_guids(card, 0, "02:00:00:00:00:00:01:00", "02:00:00:00:00:00:01:01")
        ib.rebind(card.vfs[0])
        yield card


@pytest.fixture
def config(hca: Card) -> dict[str, Any]:
    """Options of each kind: set at the PF, a binding, an RDMA device.

    Without addresses, whose steps `test_sriov_killed` has.
    """
    return {
        "deviceID": hca.vfs[0],
        "guid": GUID,
        "link_state": "enable",
        "rdmaIsolation": True,
    }


def test_add_killed_at_every_step_then_delete(
    sriov: SriovNode, hca: Card, config: dict[str, Any]
) -> None:
    before = ib.state(hca)
    with pod("pod0") as netns:
        for step in range(1, MORE_THAN_ENOUGH):
            killed = killed_at(step, partial(sriov.call, "ADD", "c1", netns, **config))
            sriov.delete("c1", netns, **config)
            assert (step, sriov.leftovers()) == (step, [])
            assert (step, ib.state(hca)) == (step, before)
            if not killed:
                break
        assert not killed
        assert step > 10, "the injection counts no changes"


def test_delete_killed_at_every_step_then_delete(
    sriov: SriovNode, hca: Card, config: dict[str, Any]
) -> None:
    before = ib.state(hca)
    with pod("pod0") as netns:
        for step in range(1, MORE_THAN_ENOUGH):
            sriov.add("c1", netns, **config)
            killed = killed_at(step, partial(sriov.call, "DEL", "c1", netns, **config))
            sriov.delete("c1", netns, **config)
            assert (step, sriov.leftovers()) == (step, [])
            assert (step, ib.state(hca)) == (step, before)
            if not killed:
                break
        assert not killed


def test_add_killed_then_the_vf_goes_to_another_pod(
    sriov: SriovNode, hca: Card, config: dict[str, Any]
) -> None:
    """With that pod's GUID, and never with the dead one's."""
    before = ib.state(hca)
    other = config | {"guid": OTHER_GUID}
    for step in range(3, MORE_THAN_ENOUGH, 6):
        with pod("shortlived") as netns:
            killed = killed_at(step, partial(sriov.call, "ADD", "c1", netns, **config))
        with pod("pod1") as netns:
            reply = sriov.add("c2", netns, **other)
            link = link_in(netns)
            assert link is not None
            assert (step, link.mac[-23:]) == (step, OTHER_GUID)
            sriov.delete("c1", "shortlived", **config)
            checked = sriov.call("CHECK", "c2", netns, previous=reply, **other)
            assert (step, checked.document) == (step, {})
            sriov.delete("c2", netns, **other)
        assert (step, sriov.leftovers()) == (step, [])
        assert (step, ib.state(hca)) == (step, before)
        if not killed:
            break
    assert not killed


def test_namespace_gone_after_a_killed_delete(
    sriov: SriovNode, hca: Card, config: dict[str, Any]
) -> None:
    before = ib.state(hca)
    for step in range(2, MORE_THAN_ENOUGH, 6):
        with pod("shortlived") as netns:
            sriov.add("c1", netns, **config)
            killed = killed_at(step, partial(sriov.call, "DEL", "c1", netns, **config))
        sriov.delete("c1", "shortlived", **config)
        assert (step, sriov.leftovers()) == (step, [])
        assert (step, ib.state(hca)) == (step, before)
        if not killed:
            break
    assert not killed
    assert cards.driver_of(hca.vfs[0]) == ib.DRIVER
