"""DEL, GC and the sweep remove everything of ours, after any failure, and nothing else."""

import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cni.attachments.journal import Journal
from cni.attachments.orphans import sweep
from cni.ipoib.plugin import IPoIB
from cni.spec.attachment import Attachment
from host.errors import HostError
from host.namespaces import NetworkNamespace
from host.netlink import link_changes, links
from host.netlink.links import Link
from host.netlink.sockets import Rtnetlink, netlink
from tests.kernel.pods import IP, NETWORK, Node, Reply, ipam, link_in, link_names, pod, run
from tests.kernel.processes import in_processes
from tests.waiting import until

CONFIG: dict[str, Any] = {"ipam": ipam("10.4.0.0/24")}


def test_delete_after_the_interface_was_deleted_or_renamed(node: Node, pods: list[str]) -> None:
    node.add("c1", pods[0], **CONFIG)
    run(IP, "-n", pods[0], "link", "delete", "net1")
    node.delete("c1", pods[0], **CONFIG)
    node.add("c2", pods[1], **CONFIG)
    run(IP, "-n", pods[1], "link", "set", "net1", "down")
    run(IP, "-n", pods[1], "link", "set", "net1", "name", "mine0")
    node.delete("c2", pods[1], **CONFIG)
    assert link_names(pods[1]) == {"lo"}
    assert node.leftovers() == []


def test_delete_finds_the_interface_whose_mark_was_overwritten(node: Node, pods: list[str]) -> None:
    node.add("c1", pods[0], **CONFIG)
    run(IP, "-n", pods[0], "link", "set", "net1", "alias", "mine")
    node.delete("c1", pods[0], **CONFIG)
    assert link_names(pods[0]) == {"lo"}
    before = link_names()
    with pod("killed") as netns:
        node.add("c2", netns, **CONFIG)
        run(IP, "-n", netns, "link", "set", "net1", "alias", "mine")
        run(IP, "netns", "delete", netns)
        node.delete("c2", netns, **CONFIG)
    assert link_names() == before


def test_delete_never_takes_an_interface_for_its_name(node: Node, pods: list[str]) -> None:
    """A foreign IPoIB child called net1 stays, in the pod and on the host."""
    for name in ("net1", "pfmine"):
        run(IP, "link", "add", name, "link", "ib0", "type", "ipoib", "pkey", "0x8003")
    run(IP, "link", "set", "net1", "netns", pods[0])
    try:
        node.delete("c1", pods[0], **CONFIG)
        nothing: dict[str, Any] = {"cni.dev/valid-attachments": []}
        assert node.call("GC", "", "", **nothing) == Reply(0, {})
        assert sweep(IPoIB(node.paths)) == ()
        assert link_in(pods[0]) is not None
        assert "pfmine" in link_names()
    finally:
        run(IP, "link", "delete", "pfmine")
        run(IP, "-n", pods[0], "link", "delete", "net1")


def test_delete_goes_on_when_the_configuration_is_broken_by_now(
    node: Node, pods: list[str]
) -> None:
    node.add("c1", pods[0], **CONFIG)
    node.delete("c1", pods[0], master="gone9", mtu=5, ipam={"type": "podfabric-ipam", "x": 1})
    assert node.leftovers() == []
    node.add("c2", pods[0], **CONFIG)
    node.delete("c2", pods[0])  # without "ipam": the journal has it
    assert node.leftovers() == []


def test_addresses_are_released_by_the_plugin_that_gave_them(node: Node, pods: list[str]) -> None:
    node.add("c1", pods[0], **CONFIG)
    node.delete("c1", pods[0], ipam={"type": "static"})
    assert node.leftovers() == []


def test_address_stays_reserved_while_the_interface_cannot_be_removed(
    node: Node, pods: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    added = node.add("c1", pods[0], **CONFIG)

    def busy(route: Rtnetlink, link: Link) -> None:
        raise HostError(f'deleting "{link.name}": busy')

    with monkeypatch.context() as patched:
        patched.setattr(link_changes, "delete", busy)
        assert node.call("DEL", "c1", pods[0], **CONFIG).document["code"] == 104
    assert node.reservations() == added.addresses
    node.delete("c1", pods[0], **CONFIG)
    assert node.leftovers() == []


def test_namespace_without_a_path_that_lives_on_is_found(node: Node) -> None:
    """The path is gone, but a process of the pod is not: its address is in use."""
    with pod("nameless") as netns:
        node.add("c1", netns, **CONFIG)
        inside = subprocess.Popen([IP, "netns", "exec", netns, "sleep", "60"])
        try:
            _until_inside(inside.pid)
            run(IP, "netns", "delete", netns)
            assert sweep(IPoIB(node.paths)) == ()  # not dead: a sweep may run in a container
            node.delete("c1", netns, **CONFIG)
            space = NetworkNamespace.open(f"/proc/{inside.pid}/ns/net")
            with space, netlink(space) as route:
                assert {link.name for link in links.every(route)} == {"lo"}
        finally:
            inside.kill()
            inside.wait()
    assert node.leftovers() == []


def test_path_that_cannot_be_opened_proves_nothing(
    node: Node, pods: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    node.add("c1", pods[0], **CONFIG)

    def full(path: str, *arguments: object) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("host.namespaces.os.open", full)
        reply = node.call("DEL", "c1", pods[0], **CONFIG)
    assert reply.exit_code == 1
    assert "Too many open files" in reply.text
    assert link_names(pods[0]) == {"lo", "net1"}
    node.delete("c1", pods[0], **CONFIG)
    assert node.leftovers() == []


def test_new_namespace_under_the_same_path_is_another(node: Node) -> None:
    """Debian's kernel gives it the same inode number immediately; its cookie differs."""
    with pod("again") as netns:
        node.add("c1", netns, **CONFIG)
        run(IP, "netns", "delete", netns)
        run(IP, "netns", "add", netns)
        added = node.add("c1", netns, **CONFIG)  # this settles the earlier attachment first
        assert node.reservations() == added.addresses
        node.delete("c1", netns, **CONFIG)
    assert node.leftovers() == []


def test_sweep_removes_dead_sandboxes_and_keeps_living_ones(node: Node, pods: list[str]) -> None:
    living = node.add("c1", pods[0], **CONFIG)
    with pod("killed") as netns:
        node.add("c2", netns, **CONFIG)
        run(IP, "netns", "delete", netns)
        _wait_for_stray()
        outcomes = sweep(IPoIB(node.paths))
    assert f"removed {NETWORK}/c2/net1: its sandbox is gone" in map(str, outcomes)
    assert node.reservations() == living.addresses
    assert link_names(pods[0]) == {"lo", "net1"}
    node.delete("c1", pods[0], **CONFIG)
    assert node.leftovers() == []


def test_sweep_leaves_the_child_that_a_delete_waits_for(node: Node) -> None:
    with pod("killed") as netns:
        node.add("c1", netns, **CONFIG)
        run(IP, "netns", "delete", netns)
    with Journal(node.paths).locked(Attachment(NETWORK, "c1", "net1")):
        _wait_for_stray()
        assert sweep(IPoIB(node.paths)) == ()
        assert any(name.startswith("interface") for name in node.leftovers())
    node.delete("c1", "", **CONFIG)
    assert node.leftovers() == []


def test_sweep_after_a_reboot_cleans_the_store_only(node: Node, pods: list[str]) -> None:
    """The entry of another boot proves nothing about this kernel, even if names match."""
    node.add("c1", pods[0], **CONFIG)
    journal = Journal(node.paths)
    (entry,) = journal.entries()
    assert not isinstance(entry, Exception)
    journal.write(msgspec.structs.replace(entry, boot_id="an-earlier-boot"))
    assert sweep(IPoIB(node.paths))
    assert node.reservations() == []
    link = link_in(pods[0])
    assert link is not None  # the interface was never another boot's; deleting the pod ends it
    run(IP, "-n", pods[0], "link", "delete", "net1")
    assert node.leftovers() == []


@pytest.mark.parametrize("damage", ["empty", "cut", "zeroed", "flipped"])
def test_damaged_journal_is_kept_aside_and_the_attachment_removed(
    node: Node, pods: list[str], damage: str
) -> None:
    node.add("c1", pods[0], **CONFIG)
    path = node.journal_file("c1")
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 0x04
    lengths = {"empty": bytearray(), "cut": content[:100], "zeroed": bytearray(len(content))}
    path.write_bytes(lengths.get(damage, content))
    again = node.call("ADD", "c1", pods[0], **CONFIG)
    assert again.document["code"] == 113
    assert "run DEL" in again.text
    node.delete("c1", pods[0], **CONFIG)
    assert link_names(pods[0]) == {"lo"}
    (aside,) = node.paths.attachments.iterdir()
    assert aside.suffix == ".damaged"
    aside.unlink()
    assert node.leftovers() == []


def test_deletes_in_parallel_all_succeed(node: Node, pods: list[str]) -> None:
    node.add("c1", pods[0], **CONFIG)
    assert in_processes([partial(node.delete, "c1", pods[0], **CONFIG)] * 8) == [0] * 8
    assert node.leftovers() == []


def _until_inside(pid: int) -> None:
    own = Path("/proc/self/ns/net").stat().st_ino
    until(lambda: Path(f"/proc/{pid}/ns/net").stat().st_ino != own)


def _wait_for_stray() -> None:
    def is_back() -> bool:
        with netlink() as host:
            return any(link.alias.startswith("podfabric:") for link in links.every(host, "ipoib"))

    until(is_back)
