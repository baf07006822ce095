"""Ports and P_Keys read from a artificial /sys."""

from pathlib import Path

import pytest

from base.paths import Paths
from host.netlink.links import Link
from host.sysfs import infiniband

PREFIX = "fe80:0000:0000:0000"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def _port(directory: Path, guid: str, pkeys: list[str], state: str = "4: ACTIVE") -> None:
    _write(directory / "gids/0", f"{PREFIX}:{guid}")
    _write(directory / "state", state)
    _write(directory / "phys_state", "5: LinkUp")
    _write(directory / "sm_lid", "0x1")
    for index, pkey in enumerate(pkeys):
        _write(directory / f"pkeys/{index}", pkey)


def _parent(name: str, guid: str) -> Link:
    mac = "80:00:01:01:" + ":".join(
        text[i : i + 2]
        for text in (PREFIX.replace(":", "") + guid.replace(":", ""),)
        for i in range(0, 32, 2)
    )
    return Link(
        index=3, name=name, kind="ipoib", link_type=32, mac=mac, broadcast="", mtu=2044, flags=0
    )


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    hcas = tmp_path / "class/infiniband"
    _port(hcas / "mlx5_0/ports/1", "0002:c903:0000:0001", ["0xffff", "0x8001", "0x0000"])
    _port(hcas / "mlx5_1/ports/1", "0002:c903:0000:0011", ["0xffff"])
    _port(hcas / "mlx5_1/ports/2", "0002:c903:0000:0012", ["0x7fff", "0x0005"], "1: DOWN")
    return Paths(sys=tmp_path)


def test_port_is_found_by_its_guid_among_hcas_and_ports(paths: Paths) -> None:
    port = infiniband.port_of(paths, _parent("ib1", "0002:c903:0000:0012"))
    assert port is not None
    assert (port.hca, port.number, port.state, port.physical_state) == (
        "mlx5_1",
        2,
        "DOWN",
        "LinkUp",
    )


def test_unknown_guid_has_no_port(paths: Paths) -> None:
    assert infiniband.port_of(paths, _parent("ib9", "0002:c903:0000:9999")) is None


def test_undecodable_gid_does_not_hide_other_ports(paths: Paths) -> None:
    (paths.sys / "class/infiniband/mlx5_0/ports/1/gids/0").write_bytes(b"\xff\n")
    port = infiniband.port_of(paths, _parent("ib1", "0002:c903:0000:0012"))
    assert port is not None
    assert port.hca == "mlx5_1"


@pytest.mark.parametrize(
    ("pkey", "member"), [(0x8001, True), (0x0001, True), (0xFFFF, True), (0x8002, False)]
)
def test_membership_ignores_the_bit_of_a_full_member(paths: Paths, pkey: int, member: bool) -> None:
    port = infiniband.port_of(paths, _parent("ib0", "0002:c903:0000:0001"))
    assert port is not None
    assert tuple(port.pkeys) == (0xFFFF, 0x8001)  # the empty slot is none
    assert port.has_pkey(pkey) is member


def test_pci_address_of_a_netdev(tmp_path: Path) -> None:
    function = tmp_path / "devices/pci0000:00/0000:af:00.1"
    function.mkdir(parents=True)
    platform = tmp_path / "devices/platform/ibloop.0"
    platform.mkdir(parents=True)
    for name, target in (("ib0", function), ("ib1", platform)):
        netdev = tmp_path / "class/net" / name
        netdev.mkdir(parents=True)
        (netdev / "device").symlink_to(target)
    paths = Paths(sys=tmp_path)
    assert infiniband.bdf_of(paths, "ib0") == "0000:af:00.1"
    assert infiniband.bdf_of(paths, "ib1") == ""
    assert infiniband.bdf_of(paths, "ib2") == ""
