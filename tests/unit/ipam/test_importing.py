"""Taking over the stores of host-local and whereabouts."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam.addresses import parse_interface
from ipam.importing import Defaults, host_local, import_all, whereabouts
from tests.unit.ipam.calls import BOOT, Calls, error_of

DEFAULTS = Defaults(network="n1", boot=BOOT, since=1_700_000_000)

POOLS = """\
apiVersion: v1
kind: List
items:
- apiVersion: whereabouts.cni.cncf.io/v1alpha1
  kind: IPPool
  metadata: {name: 10.10.0.0-16}
  spec:
    range: 10.10.0.0/16
    allocations:
      "1": {id: c1, podref: default/p1, ifname: net1}
      "256": {id: c2, podref: kube-system/p2}
- kind: OverlappingRangeIPReservation
  metadata: {name: 10.10.0.1}
  spec: {podref: default/p1}
---
kind: IPPool
metadata: {name: blue-fd00---64}
spec:
  range: fd00::/64
  allocations:
    "9223372036854775809": {id: c3, podref: default/p3, ifname: net1}
---
kind: IPPool
metadata: {name: empty}
spec: {range: 10.99.0.0/24, allocations: {}}
---
"""


@pytest.fixture
def pools(tmp_path: Path) -> Path:
    file = tmp_path / "pools.yaml"
    file.write_text(POOLS)
    return file


def test_an_entry_of_an_old_whereabouts_names_no_pod(tmp_path: Path) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text("kind: IPPool\nspec: {range: 10.0.0.0/24, allocations: {'1': {id: c1}}}\n")
    (found,) = whereabouts(file, replace(DEFAULTS, network_name=""), [])
    assert (found.address, found.container_id, found.pod, found.namespace) == (
        "10.0.0.1",
        "c1",
        "",
        "",
    )


def test_pools_of_whereabouts_are_read(pools: Path) -> None:
    notes: list[str] = []
    found = whereabouts(pools, DEFAULTS, notes)
    assert [
        (
            reservation.domain,
            reservation.address,
            reservation.range,
            reservation.container_id,
            reservation.ifname,
            reservation.namespace,
            reservation.pod,
        )
        for reservation in found
    ] == [
        ("", "10.10.0.1", "10.10.0.0/16", "c1", "net1", "default", "p1"),
        ("", "10.10.1.0", "10.10.0.0/16", "c2", "eth0", "kube-system", "p2"),
        ("blue", "fd00::8000:0:0:1", "fd00::/64", "c3", "net1", "default", "p3"),
    ]
    assert all(reservation.network == "n1" and reservation.boot == BOOT for reservation in found)
    assert len(notes) == 1
    assert "OverlappingRangeIPReservation" in notes[0]


@pytest.mark.parametrize(
    ("spec", "seen"),
    [
        ("{range: nonsense, allocations: {}}", '"spec.range"'),
        ('{range: 10.0.0.0/24, allocations: {"256": {id: c, podref: a/b}}}', "allocations.256"),
        ('{range: 10.0.0.0/24, allocations: {"-1": {id: c, podref: a/b}}}', "allocations.-1"),
        ('{range: 10.0.0.0/24, allocations: {"1": {podref: a/b}}}', "id"),
        ("{allocations: {}}", "range"),
    ],
)
def test_a_pool_that_makes_no_sense_is_named(tmp_path: Path, spec: str, seen: str) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text(f"kind: IPPool\nmetadata: {{name: mine}}\nspec: {spec}\n")
    with pytest.raises(CNIError) as caught:
        whereabouts(file, DEFAULTS, [])
    assert "IPPool mine" in caught.value.message
    assert seen in caught.value.message


def test_what_is_no_yaml_is_named(tmp_path: Path) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text("{[")
    with pytest.raises(CNIError, match="is not YAML"):
        whereabouts(file, DEFAULTS, [])


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


def test_a_directory_of_host_local_is_read(directory: Path) -> None:
    notes: list[str] = []
    defaults = Defaults(
        network="n1", boot=BOOT, since=0, ranges=(parse_interface("10.1.2.0/24")[1],)
    )
    found = host_local(directory, defaults, notes)
    assert [
        (reservation.address, reservation.range, reservation.container_id, reservation.ifname)
        for reservation in found
    ] == [
        ("10.1.2.2", "10.1.2.0/24", "c1", "eth0"),
        ("10.1.2.3", "10.1.2.0/24", "old-format", "eth0"),
        ("2001:db8:1::2", "2001:db8:1::2/128", "c1", "eth0"),
    ]
    assert len(notes) == 2


def test_imported_addresses_belong_to_their_pods(node: Calls, pools: Path) -> None:
    found = whereabouts(pools, DEFAULTS, [])
    assert import_all(node.store, found) == 3
    assert import_all(node.store, found) == 0
    ipam = {"range": "10.10.0.0/16"}
    assert node.addresses(ipam, "new") == ["10.10.0.2/16"]
    node.delete(ipam, "c1", ifname="net1")
    assert "10.10.0.1" not in node.held()


def test_an_import_with_a_conflict_imports_nothing_and_names_it(node: Calls, pools: Path) -> None:
    node.add({"range": "10.10.0.0/16"}, "here", pod="q")
    found = whereabouts(pools, DEFAULTS, [])
    error = error_of(lambda: import_all(node.store, found))
    assert error.code == Code.ADDRESS_TAKEN
    assert "10.10.0.1: held by pod ns/q" in error.message
    assert "not by pod default/p1" in error.message
    assert list(node.held()) == ["10.10.0.1"]


def test_ranges_that_do_not_overlap_keep_their_own_domain(pools: Path) -> None:
    private = Defaults(network="n1", boot=BOOT, since=0, shared=False)
    assert {reservation.domain for reservation in whereabouts(pools, private, [])} == {
        " 10.10.0.0/16",
        "blue fd00::/64",
    }
