"""The inventory: when it reads sysfs again, and what it reports."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from base.paths import Paths
from deviceplugin.inventory import Inventory
from host.sysfs import discovery
from host.sysfs.discovery import HCA
from tests.unit.host import servers
from tests.unit.host.sysfs import Tree

FIRST = servers.DGX_HCAS[0]


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return servers.dgx(tmp_path)


def down(paths: Paths, number: int = 0) -> None:
    tree = Tree(paths.sys, paths)
    tree.write(f"class/infiniband/mlx5_{number}/ports/1/state", "1: DOWN")


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Paths]:
    """How often all of sysfs was read."""
    seen: list[Paths] = []

    def counted(paths: Paths) -> list[HCA]:
        seen.append(paths)
        return discovery.hcas(paths)

    monkeypatch.setattr("deviceplugin.inventory.discovery", SimpleNamespace(hcas=counted))
    return seen


def test_nothing_differs_until_something_changes(paths: Paths) -> None:
    seen = Inventory(paths)
    seen.look()
    assert not seen.differs()
    down(paths)
    assert seen.differs()
    seen.look()
    assert not seen.differs()


def test_rates_are_read_only_when_they_are_compared(paths: Paths) -> None:
    """A failed lane changes neither carrier nor state."""
    seen = Inventory(paths)
    seen.look()
    Tree(paths.sys, paths).write("class/infiniband/mlx5_0/ports/1/rate", "100 Gb/sec (1X NDR)")
    assert not seen.differs()
    assert seen.differs(rates=True)
    seen.look()
    assert not seen.differs(rates=True)


def test_interface_of_a_pod_is_no_change_but_one_of_the_hardware_is(paths: Paths) -> None:
    seen = Inventory(paths)
    seen.look()
    Tree(paths.sys, paths).netdev("", "veth0")
    assert not seen.differs()
    Tree(paths.sys, paths).netdev(FIRST, "ib9")
    assert seen.differs()


def test_allocation_that_looks_keeps_no_change_to_itself(paths: Paths) -> None:
    seen = Inventory(paths)
    seen.look()
    down(paths, 1)
    Tree(paths.sys, paths).write("class/infiniband_verbs/uverbs0/dev", "231:250")
    (found,) = seen.current([FIRST]).values()
    assert found.rdma[0].uverbs is not None
    assert found.rdma[0].uverbs.minor == 250
    assert seen.differs()
    seen.look()
    assert not seen.differs()


def test_numbers_of_mad_devices_are_those_of_now(paths: Paths, looks: list[Paths]) -> None:
    seen = Inventory(paths)
    seen.look()
    Tree(paths.sys, paths).write("class/infiniband_mad/umad0/dev", "231:250")
    umad = seen.current([FIRST])[FIRST].rdma[0].ports[0].umad
    assert umad is not None
    assert umad.minor == 250
    assert len(looks) == 2


def test_rdma_device_that_is_back_from_a_pod_is_seen_at_once(paths: Paths) -> None:
    link = paths.sys / "class/infiniband/mlx5_0"
    target = link.readlink()
    device = link.resolve()
    device.rename(device.with_name("away"))
    link.unlink()
    seen = Inventory(paths)
    seen.look()
    assert seen.current([FIRST])[FIRST].rdma == ()
    device.with_name("away").rename(device)
    link.symlink_to(target)
    assert [device.name for device in seen.current([FIRST])[FIRST].rdma] == ["mlx5_0"]


def test_what_is_gone_or_in_a_pod_is_not_looked_for_again_and_again(
    paths: Paths, looks: list[Paths]
) -> None:
    Tree(paths.sys, paths).remove(FIRST)
    (paths.sys / "bus/pci/devices" / FIRST).unlink()
    seen = Inventory(paths)
    seen.look()
    for _ in range(3):
        assert seen.current([FIRST, servers.DGX_HCAS[1]]).keys() == {servers.DGX_HCAS[1]}
    assert len(looks) == 1
