"""The store of nv-ipam's daemon is taken over: pods keep their addresses, and DELs release them."""

import json
import re
import socket
from contextlib import closing
from pathlib import Path

import pytest

from cni.spec.errors import CNIError, Code
from ipam.importing import import_all
from ipam.nv_ipam.importing import IMPORTED, is_store, reservations
from tests.fake_api import FakeApi
from tests.unit.ipam.calls import request
from tests.unit.ipam.cluster.nv_ipam.nodes import NETWORK, FollowingNode, put_ippool

STORE = Path(__file__).with_name("store.json").read_bytes()
"""Written by nv-ipam's own code (pkg/ipam-node/types, 3ce4a34)."""
BOOT = "boot-1"


def checksummed(document: dict[str, object]) -> bytes:
    """The document as nv-ipam writes it: the checksum is of the text that has 0 in its place."""
    text = json.dumps({**document, "checksum": 0}, separators=(",", ":")).encode()
    found = 2166136261
    for byte in text:
        found = (found ^ byte) * 16777619 % (1 << 32)
    return text.replace(b'"checksum":0', b'"checksum":%d' % found, 1)


def thousand(count: int = 1000) -> bytes:
    """A store with so many pods in 10.0.0.0/16, from 10.0.1.0 on."""
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
    assert is_store(STORE)
    found = {(each.domain, each.address): each for each in reservations(source, BOOT)}
    assert sorted(found) == [
        ("nv-ipam/cidrpool/six", "fd00:1::2"),
        ("nv-ipam/ippool/pool1", "192.168.0.2"),
        ("nv-ipam/ippool/pool1", "192.168.0.3"),
    ]
    first = found["nv-ipam/ippool/pool1", "192.168.0.2"]
    assert (first.range, first.container_id, first.ifname) == ("192.168.0.0/16", "c1", "net1")
    assert (first.pod_name, first.uid, first.boot, first.network) == ("ns/p1", "u1", BOOT, IMPORTED)
    assert first.since == 1795168800


@pytest.mark.parametrize(
    ("pattern", "by", "said"),
    [
        (rb"192\.168\.0\.2\b", b"192.168.0.9", "checksum is wrong"),
        (rb'"version":1', b'"version":2', "it has version 2, and 1 is known"),
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


def test_nothing_is_imported_while_the_daemon_answers(source: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as daemon:
        daemon.bind(str(source.with_name("daemon.sock")))
        daemon.listen()
        with pytest.raises(CNIError, match="stop it on this node") as caught:
            reservations(source, BOOT)
        assert caught.value.code == Code.TRY_AGAIN
    assert len(reservations(source, BOOT)) == 3  # its socket is left behind


def test_a_thousand_pods_keep_their_addresses_and_their_deletions_release_them(
    memory_path: Path, source: Path
) -> None:
    server = FakeApi()
    put_ippool(server, {"a": ("10.0.1.0", "10.0.16.255")}, "10.0.0.0/16")
    node = FollowingNode(server, memory_path, "a")
    node.step()
    source.write_bytes(thousand())
    assert import_all(node.store, reservations(source, BOOT)) == 1000
    assert import_all(node.store, reservations(source, BOOT)) == 0
    node.step()
    assert node.add("new", ifname="net1") == ["10.0.4.232/16"]
    # A hundred pods get a new sandbox; of some the runtime deletes the old one first.
    for number in range(100):
        if number % 2:
            node.add(f"p{number}", container=f"d{number}", uid=f"u{number}", ifname="net1")
            deletion(node, f"c{number}")
        else:
            address = f"10.0.{1 + number // 256}.{number % 256}/16"
            assert node.add(
                f"p{number}", container=f"d{number}", uid=f"u{number}", ifname="net1"
            ) == [address]
    held = {each.address: each.container_id for each in node.store.reservations()}
    assert [held[f"10.0.1.{number}"] for number in range(100)] == [
        f"d{number}" for number in range(100)
    ]
    # Again after that: nothing is new, and nothing is a conflict.
    assert import_all(node.store, reservations(source, BOOT)) == 0
    with pytest.raises(CNIError, match="already holds") as caught:
        node.add("p500", container="c500", ifname="net1")
    assert caught.value.code == Code.ALREADY_ATTACHED
    for number in range(1000):
        deletion(node, f"d{number}" if number < 100 else f"c{number}")
    assert node.held() == {"10.0.4.232"}


def deletion(node: FollowingNode, container: str) -> None:
    """DEL, by container and interface."""
    node.plugin.delete(
        request("DEL", {"type": "nv-ipam"}, container, network=NETWORK, ifname="net1")
    )
