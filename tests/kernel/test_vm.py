"""The machine itself: ibloop's HCAs carry the kernel's IPoIB in the way that other tests need."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from base.waiting import wait_until
from tests.kernel.igb import ibloop_unloaded, with_hcas
from tests.waiting import PATIENCE, until

HCAS = ("ibloop0", "ibloop1")
PARENTS = ("ib0", "ib1")
INFINIBAND = Path("/sys/class/infiniband")


def ip(*arguments: str) -> str:
    """Run ip(8), by its path, because a busybox shell has another one."""
    command = ["/usr/sbin/ip", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def knob(hca: str, name: str) -> Path:
    return INFINIBAND / hca / "ibloop" / name


def counter(hca: str, name: str) -> int:
    return int((INFINIBAND / hca / "ports/1/hw_counters" / name).read_text())


def has_carrier(link: str, netns: str | None = None) -> bool:
    where = ["-n", netns] if netns else []
    return "LOWER_UP" in ip(*where, "-brief", "link", "show", link)


def becomes(condition: Callable[[], bool], expected: bool = True) -> bool:
    """Whether the condition gets that value."""
    return wait_until(lambda: condition() is expected, PATIENCE)


def pings(netns: str, address: str, tries: int = 5) -> bool:
    """Whether an echo comes back; address resolution may cost the first tries."""
    command = ["/usr/sbin/ip", "netns", "exec", netns, "ping", "-n", "-c", "1", "-W", "1", address]
    return any(
        subprocess.run(command, check=False, capture_output=True).returncode == 0
        for _ in range(tries)
    )


@contextmanager
def pod(netns: str, parent: str, pkey: str, address: str) -> Iterator[None]:
    """A namespace with a child of `parent` in it, named net1, up, with an address."""
    ip("netns", "add", netns)
    try:
        ip("link", "add", f"tmp-{netns}", "link", parent, "type", "ipoib", "pkey", pkey)
        ip("link", "set", f"tmp-{netns}", "netns", netns, "name", "net1")
        ip("-n", netns, "address", "add", address, "dev", "net1")
        ip("-n", netns, "link", "set", "net1", "up")
        yield
        ip("-n", netns, "link", "delete", "net1")
    finally:
        ip("netns", "delete", netns)


@pytest.mark.parametrize("parent", PARENTS)
def test_parent_has_carrier(parent: str) -> None:
    assert has_carrier(parent)


@pytest.mark.parametrize("hca", HCAS)
def test_hca_has_a_uverbs_node_and_a_netdev_beside_it(hca: str) -> None:
    (uverbs,) = (INFINIBAND / hca / "device" / "infiniband_verbs").iterdir()
    (umad,) = (INFINIBAND / hca / "device" / "infiniband_mad").glob("umad*")
    (netdev,) = (INFINIBAND / hca / "device" / "net").iterdir()
    assert Path("/dev/infiniband", uverbs.name).is_char_device()
    assert Path("/dev/infiniband", umad.name).is_char_device()
    assert (netdev / "device" / "infiniband" / hca).exists()


def test_hcas_have_different_guids() -> None:
    guids = [(INFINIBAND / hca / "node_guid").read_text() for hca in HCAS]
    gids = [(INFINIBAND / hca / "ports/1/gids/0").read_text() for hca in HCAS]
    assert len({*guids, *gids}) == 2 * len(HCAS)


def test_pkey_table_is_in_sysfs() -> None:
    table = INFINIBAND / "ibloop0/ports/1/pkeys"
    pkeys = [(table / str(index)).read_text().strip() for index in range(5)]
    assert pkeys == ["0xffff", "0x8001", "0x8002", "0x8003", "0x0000"]


@pytest.mark.parametrize("parents", [("ib0", "ib0"), ("ib0", "ib1")])
def test_children_reach_each_other_within_a_partition(parents: tuple[str, str]) -> None:
    with (
        pod("blue1", parents[0], "0x8001", "10.9.0.1/24"),
        pod("blue2", parents[1], "0x8001", "10.9.0.2/24"),
    ):
        assert becomes(lambda: has_carrier("net1", "blue2"))
        assert pings("blue1", "10.9.0.2")
        assert pings("blue2", "10.9.0.1")


def test_children_do_not_reach_each_other_across_partitions() -> None:
    with (
        pod("blue", "ib0", "0x8001", "10.9.0.1/24"),
        pod("blue2", "ib1", "0x8001", "10.9.0.2/24"),
        pod("green", "ib1", "0x8002", "10.9.0.3/24"),
    ):
        assert pings("blue", "10.9.0.2")
        assert becomes(lambda: has_carrier("net1", "green"))
        assert not pings("blue", "10.9.0.3", tries=2)
        assert not pings("green", "10.9.0.1", tries=2)


def test_port_down_removes_the_carrier_and_up_restores_it() -> None:
    with pod("blue", "ib0", "0x8001", "10.9.0.1/24"):
        assert becomes(lambda: has_carrier("net1", "blue"))
        try:
            knob("ibloop0", "port").write_text("down")
            assert becomes(lambda: has_carrier("ib0"), False)
            assert becomes(lambda: has_carrier("net1", "blue"), False)
            assert "DOWN" in (INFINIBAND / "ibloop0/ports/1/state").read_text()
            assert has_carrier("ib1")
        finally:
            knob("ibloop0", "port").write_text("up")
        assert becomes(lambda: has_carrier("ib0"))
        assert becomes(lambda: has_carrier("net1", "blue"))


def test_child_gets_carrier_when_its_pkey_enters_the_table() -> None:
    with pod("late", "ib0", "0x8010", "10.9.0.1/24"):
        time.sleep(1)
        assert not has_carrier("net1", "late")
        try:
            knob("ibloop0", "pkey").write_text("5 0x8010")
            assert becomes(lambda: has_carrier("net1", "late"))
            assert (INFINIBAND / "ibloop0/ports/1/pkeys/5").read_text().strip() == "0x8010"
        finally:
            knob("ibloop0", "pkey").write_text("5 0")
        assert becomes(lambda: has_carrier("net1", "late"), False)


def test_silent_subnet_administrator_means_no_carrier() -> None:
    before = counter("ibloop0", "tx_drop_sa_off")
    knob("ibloop0", "sa").write_text("off")
    try:
        with pod("mute", "ib0", "0x8002", "10.9.0.1/24"):
            until(lambda: counter("ibloop0", "tx_drop_sa_off") > before)
            assert not has_carrier("net1", "mute")
            knob("ibloop0", "sa").write_text("on")
            assert becomes(lambda: has_carrier("net1", "mute"))
    finally:
        knob("ibloop0", "sa").write_text("on")


@pytest.mark.parametrize("name", ["cq_overrun", "rx_drop_qkey", "rx_drop_too_long"])
def test_nothing_was_dropped_that_only_a_defect_drops(name: str) -> None:
    assert [counter(hca, name) for hca in HCAS] == [0, 0]


@pytest.mark.parametrize("module", ["8021q", "dummy", "ifb", "macvlan", "rdma_rxe", "veth"])
def test_kernel_module_can_be_loaded(module: str) -> None:
    subprocess.run(["/sbin/modprobe", module], check=True)


def test_kernel_loads_the_module_of_a_link_type() -> None:
    ip("link", "add", "b0", "type", "bridge")
    ip("link", "delete", "b0")


def test_zy_module_goes_and_comes_back_under_live_interfaces() -> None:
    ip("netns", "add", "orphan")
    try:
        ip("link", "add", "tmp-orphan", "link", "ib0", "type", "ipoib", "pkey", "0x8001")
        ip("link", "set", "tmp-orphan", "netns", "orphan", "name", "net1")
        ip("-n", "orphan", "link", "set", "net1", "up")
        with ibloop_unloaded():
            assert not (INFINIBAND / "ibloop0").exists()
            assert "net1" not in ip("-n", "orphan", "link")
    finally:
        ip("netns", "delete", "orphan")


def test_zz_hca_registers_under_a_pci_function() -> None:
    function = min(Path("/sys/bus/pci/devices").iterdir())
    with with_hcas(function.name):
        assert (function / "infiniband/ibloop0").is_dir()
        assert (function / "infiniband_verbs").is_dir()
        assert becomes((function / "net/ib0").is_dir)
