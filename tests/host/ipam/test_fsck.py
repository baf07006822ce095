"""`podfabric ipam fsck` beside network namespaces that live: what they use is not given out."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipam.fsck import LivingAddress
from ipam.recovery import BACKUP, DATABASE, back_up
from ipam.sqlite_store import SqliteStore
from ipam.store_files import StoreFiles
from tests.netns import namespace
from tests.unit.ipam.calls import BOOT, owner, range_of, sets_of

IP = "/usr/sbin/ip"
SETS = sets_of(range_of("10.99.0.0/24"), range_of("fd99::/64"))


def ip(*words: str) -> None:
    subprocess.run([IP, *words], check=True, capture_output=True)


@pytest.fixture
def pod() -> Iterator[str]:
    """A namespace whose interface has addresses that another plugin configured."""
    with namespace() as path:
        name = path.name
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "link", "add", "net1", "type", "veth", "peer", "name", "other")
        ip("-n", name, "address", "add", "10.99.0.2/24", "dev", "net1")
        ip("-n", name, "address", "add", "fd99::7/64", "dev", "net1", "nodad")
        ip("-n", name, "link", "set", "net1", "up")
        yield name


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory whose store has one reservation, and a backup copy."""
    SqliteStore(tmp_path / "ipam", BOOT).reserve(owner("c1"), SETS)
    with StoreFiles(tmp_path / "ipam", kept=False).transaction() as tables:
        back_up(tmp_path / "ipam", tables)
    return tmp_path


def podfabric(state: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("podfabric"), "ipam", *words],
        env={"PATH": os.environ["PATH"], "PODFABRIC_STATE": str(state)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def held(state: Path) -> dict[str, str]:
    listed = json.loads(podfabric(state, "list", "-o", "json").stdout)
    return {entry["address"]: entry["container_id"] for entry in listed}


def test_living_addresses_of_another_plugin_are_held_by_a_rebuild(state: Path, pod: str) -> None:
    (state / "ipam" / DATABASE).write_bytes(bytes(5000))
    repaired = podfabric(state, "fsck")
    assert repaired.returncode == 0, repaired
    assert f"10.99.0.2 is in use on net1 in /run/netns/{pod}" in repaired.stdout
    namespace = f"/run/netns/{pod}"
    assert held(state) == {
        "10.99.0.1": "c1", "fd99::1": "c1", "10.99.0.2": namespace, "fd99::7": namespace,
    }  # fmt: skip
    grant = SqliteStore(state / "ipam", BOOT).reserve(owner("new"), SETS)
    assert [granted.reservation.address for granted in grant.granted] == ["10.99.0.3", "fd99::2"]
    assert podfabric(state, "release", "10.99.0.2", "--force").returncode == 0


def test_sound_store_is_left_as_it_is_and_the_address_is_reported(state: Path, pod: str) -> None:
    checked = podfabric(state, "fsck")
    assert checked.returncode == 0, checked
    assert f"10.99.0.2 on net1 in /run/netns/{pod} is in 10.99.0.0/24" in checked.stdout
    assert held(state) == {"10.99.0.1": "c1", "fd99::1": "c1"}
    assert podfabric(state, "fsck", "--rebuild").returncode == 0
    assert held(state).keys() == {"10.99.0.1", "fd99::1", "10.99.0.2", "fd99::7"}


def test_reservation_that_is_nowhere_else_than_in_a_living_namespace_is_not_lost(
    state: Path, pod: str
) -> None:
    """The backup copy knows the range alone: the pod came later, and its plugin is not ours."""
    SqliteStore(state / "ipam", BOOT).reserve(owner("later"), sets_of(range_of("10.99.0.0/24")))
    (state / "ipam" / DATABASE).write_bytes(bytes(5000))
    refused = podfabric(state, "fsck")
    assert refused.returncode == 1, "the backup copy is older, so it proves nothing of c1"
    assert (state / "ipam" / BACKUP).exists()
    repaired = podfabric(state, "fsck", "--accept-loss")
    assert repaired.returncode == 0, repaired
    assert held(state)["10.99.0.2"] == f"/run/netns/{pod}"


def test_addresses_of_loopbacks_and_links_are_left_out(pod: str) -> None:
    from cli.ipam import living

    shown = {found for found in living() if found.namespace == f"/run/netns/{pod}"}
    namespace = f"/run/netns/{pod}"
    assert shown == {
        LivingAddress("10.99.0.2", "net1", namespace),
        LivingAddress("fd99::7", "net1", namespace),
    }
