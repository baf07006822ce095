"""Taking over the store of host-local."""

from pathlib import Path

import pytest

from cni.spec.errors import Code
from ipam.addresses import parse_interface
from ipam.importing import host_local
from ipam.store import Reservation
from tests.unit.ipam.calls import BOOT, Calls, error_of


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "networks" / "n1"
    directory.mkdir(parents=True)
    (directory / "10.1.2.2").write_bytes(b"c1\r\neth0")
    (directory / "2001:db8:1::2").write_bytes(b"c1\r\neth0")
    (directory / "10.1.2.3").write_bytes(b" old-format \n")
    (directory / "10.1.2.4").write_bytes(b"")
    (directory / "last_reserved_ip.0").write_bytes(b"10.1.2.4")
    (directory / "lock").write_bytes(b"")
    (directory / "README").write_bytes(b"?")
    return directory


def found(directory: Path) -> list[Reservation]:
    return host_local(directory, [parse_interface("10.1.2.0/24")[1]], BOOT, [])


def test_a_directory_of_host_local_is_read(directory: Path) -> None:
    notes: list[str] = []
    ranges = [parse_interface("10.1.2.0/24")[1]]
    assert [
        (each.address, each.range, each.network, each.container_id, each.ifname)
        for each in host_local(directory, ranges, BOOT, notes)
    ] == [
        ("10.1.2.2", "10.1.2.0/24", "n1", "c1", "eth0"),
        ("10.1.2.3", "10.1.2.0/24", "n1", "old-format", "eth0"),
        ("2001:db8:1::2", "2001:db8:1::2/128", "n1", "c1", "eth0"),
    ]
    assert len(notes) == 2


def test_an_import_with_a_conflict_imports_nothing_and_names_it(
    node: Calls, directory: Path
) -> None:
    node.add({"range": "10.1.2.2-10.1.2.9/24"}, "here", pod="q")
    error = error_of(lambda: node.store.load(found(directory)))
    assert error.code == Code.ADDRESS_TAKEN
    assert "10.1.2.2: held by pod ns/q" in error.message
    assert "not by n1/c1/eth0" in error.message
    assert list(node.held()) == ["10.1.2.2"]
