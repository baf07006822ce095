"""`podfabric ipam fsck` with living network namespaces: their addresses are not given out."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from base.paths import Paths
from cni.attachments import node_facts
from cni.spec.errors import CNIError
from ipam.store.database import DATABASE
from ipam.store.sqlite_store import SqliteStore
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
    """A state directory whose store has one reservation."""
    SqliteStore(tmp_path / "ipam", BOOT).reserve(owner("c1"), SETS)
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


def given(state: Path, name: str) -> list[str]:
    """The addresses that a process for one call gives to a new container."""
    files = node_facts.store_of(Paths(state=state))
    grant = SqliteStore(files, BOOT).reserve(owner(name), SETS)
    return [each.reservation.address for each in grant.granted]


def test_unreserved_living_address_is_reported_and_never_given_after_a_rebuild(
    state: Path, pod: str
) -> None:
    checked = podfabric(state, "fsck")
    assert checked.returncode == 0, checked
    assert f"10.99.0.2 on net1 in /run/netns/{pod} is in a range" in checked.stdout
    assert podfabric(state, "fsck", "--rebuild").returncode == 0
    assert given(state, "new") == ["10.99.0.1", "fd99::1"]
    assert given(state, "next") == ["10.99.0.3", "fd99::2"]
    ip("-n", pod, "link", "delete", "net1")
    assert given(state, "later") == ["10.99.0.2", "fd99::3"]


def test_a_store_that_was_lost_gives_no_living_address_to_another_pod(
    state: Path, pod: str
) -> None:
    SqliteStore(state / "ipam", BOOT).reserve(owner("later"), SETS[:1])
    (state / "ipam" / DATABASE).write_bytes(bytes(5000))
    refused = podfabric(state, "fsck")
    assert refused.returncode == 1, refused
    assert "NOT sound" in refused.stdout
    with pytest.raises(CNIError, match="lost changes and was built again"):
        given(state, "new")
    assert given(state, "new") == ["10.99.0.1", "fd99::1"]
    assert given(state, "next") == ["10.99.0.3", "fd99::2"]


def test_addresses_of_loopbacks_and_links_are_left_out(pod: str, tmp_path: Path) -> None:
    namespace = f"/run/netns/{pod}"
    found = node_facts.look(Paths(state=tmp_path)).living
    shown = {each.address: each.ifname for each in found if each.namespace == namespace}
    assert shown == {"10.99.0.2": "net1", "fd99::7": "net1"}
