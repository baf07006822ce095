"""The store of nv-ipam's daemon is taken over: pods keep their addresses, and DELs release them."""

import json
import re
import socket
from contextlib import closing
from pathlib import Path

import pytest

from cni.spec.errors import CNIError, Code
from ipam.nv_ipam.importing import reservations
from ipam.store.reservations import UNNAMED
from tests.unit.ipam.nv_ipam.nodes import World, checksummed, put_ippool

STORE = Path(__file__).with_name("store.json").read_bytes()
"""Written by nv-ipam's own code (pkg/ipam-node/types, 3ce4a34)."""
BOOT = "boot-1"


def thousand(count: int = 1000) -> bytes:
    """A store with `count` pods in 10.0.0.0/16, from 10.0.1.0 on."""
    snapshot = '{"subnet":"10.0.0.0/16","startIP":"10.0.1.0","endIP":"10.0.16.255"}'
    entries = {
        f"c{number}_net1": {
            "container_id": f"c{number}",
            "interface_name": "net1",
            "ip_address": f"10.0.{1 + number // 256}.{number % 256}",
            "metadata": {
                "pod_uuid": f"u{number}",
                "pod_name": f"p{number}",
                "pod_namespace": "ns",
                "pool_config_snapshot": snapshot,
            },
        }
        for number in range(count)
    }
    pool = {"name": "pool", "entries": entries}
    return checksummed({"version": 1, "checksum": 0, "pools": {"pool": pool}})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    path.write_bytes(STORE)
    return path


def test_what_nv_ipam_wrote_is_read(source: Path) -> None:
    found = {(each.domain, each.address): each for each in reservations(source, BOOT)}
    assert sorted(found) == [
        ("nv-ipam/pools", "192.168.0.2"),
        ("nv-ipam/pools", "192.168.0.3"),
        ("nv-ipam/pools", "fd00:1::2"),
    ]
    first = found["nv-ipam/pools", "192.168.0.2"]
    assert (first.range, first.container_id, first.ifname) == ("192.168.0.0/16", "c1", "net1")
    assert (first.pod_name, first.uid, first.boot, first.network) == ("ns/p1", "u1", BOOT, UNNAMED)


@pytest.mark.parametrize(
    ("pattern", "by", "said"),
    [
        (rb"192\.168\.0\.2\b", b"192.168.0.9", "checksum is wrong"),
        (rb'"version":1', b'"version":2', "the file has version 2, but podfabric reads version 1"),
        (rb"\}$", b"", "store"),
    ],
)
def test_a_damaged_store_is_refused_whole(
    source: Path, pattern: bytes, by: bytes, said: str
) -> None:
    source.write_bytes(re.sub(pattern, by, STORE.rstrip(), count=1))
    with pytest.raises(CNIError, match="nothing was done") as caught:
        reservations(source, BOOT)
    assert (caught.value.code, said in caught.value.message) == (Code.DECODING_FAILURE, True)


@pytest.mark.parametrize(
    ("metadata", "key"),
    [({}, "pool_config_snapshot"), ({"pool_config_snapshot": "{}"}, "subnet")],
)
def test_a_key_that_an_entry_lacks_is_named(
    source: Path, metadata: dict[str, str], key: str
) -> None:
    document = json.loads(thousand(1))
    document["pools"]["pool"]["entries"]["c0_net1"]["metadata"] = metadata
    source.write_bytes(checksummed({**document, "checksum": 0}))
    with pytest.raises(CNIError, match=rf'\(an entry has no "{key}"\): nothing was done'):
        reservations(source, BOOT)


def test_nothing_is_imported_while_the_daemon_answers(source: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as daemon:
        daemon.bind(str(source.with_name("daemon.sock")))
        daemon.listen()
        with pytest.raises(CNIError, match="stop the daemon on this node") as caught:
            reservations(source, BOOT)
        assert caught.value.code == Code.TRY_AGAIN
    assert len(reservations(source, BOOT)) == 3  # its socket is left behind


@pytest.mark.slow
def test_a_thousand_pods_keep_their_addresses_and_their_deletions_release_them(
    memory_path: Path,
) -> None:
    world = World(memory_path)
    put_ippool(
        world.server,
        {"a": ("10.0.1.0", "10.0.16.255")},
        "10.0.0.0/16",
        per_node_block_size=4096,
    )
    node = world.node("a")
    node.daemon_store.parent.mkdir()
    node.daemon_store.write_bytes(thousand())
    world.settle()
    held = {each.address: each.container_id for each in node.store.reservations()}
    assert len(held) == 1000
    assert node.store.load(reservations(node.daemon_store, BOOT)) == 0
    new = {world.add(node, f"new{number}")[0].removesuffix("/16") for number in range(300)}
    assert not new & held.keys()
    # A hundred pods get a new sandbox; then the runtime deletes the old one.
    for number in range(100):
        world.add(node, f"p{number}")
        node.delete("", f"c{number}", ifname="net1")
    for number in range(100, 1000):
        node.delete("", f"c{number}", ifname="net1")
    assert len(node.held()) == 400
    assert all(each.network == "net" for each in node.store.reservations())
