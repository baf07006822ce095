"""A tenant tries to start an executable of its choice as root, with `ipam.type`."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cni.attachments.journal import Journal
from tests.attacks.node import ATTACHMENT, Attacked, Reply
from tests.conformance.node import Delegate
from tests.netns import namespace
from tests.unit.host import servers

VF = servers.VFS_ETHERNET[0]
ALLOWED, FORBIDDEN = "host-local", "bridge"
VALID = "cni.dev/valid-attachments"


@pytest.fixture
def node() -> Iterator[Attacked]:
    """A node whose CNI directory only root can write."""
    with tempfile.TemporaryDirectory(prefix="pf-") as root, namespace() as netns:
        attacked = Attacked(servers.vfs(Path(root)), netns)
        attacked.paths.cni_bin.mkdir(mode=0o755)
        yield attacked


def _call(node: Attacked, command: str, ipam_type: str, path: str = "/nowhere") -> Reply:
    config: dict[str, Any] = {"ipam": {"type": ipam_type}}
    if command == "GC":
        config[VALID] = []
    return node.call(command, path=path, **config)


def _attached(node: Attacked, ipam_type: str) -> None:
    node.has_attached(f'{{"type":"{ipam_type}"}}')


@pytest.mark.parametrize("plugin", ["sriov", "ipoib"])
@pytest.mark.parametrize("ipam_type", [FORBIDDEN, "../../../bin/sh", "/bin/sh", "..", "a\0b"])
def test_add_with_a_type_that_is_not_allowed_is_refused_before_anything_is_done(
    node: Attacked, plugin: str, ipam_type: str
) -> None:
    delegate = Delegate.install(node.paths.cni_bin, FORBIDDEN)
    config: dict[str, Any] = {"deviceID": VF} if plugin == "sriov" else {"master": "ib0"}
    path = str(node.paths.cni_bin)
    for command, code in (("ADD", 121), ("STATUS", 50)):
        reply = node.call(command, plugin, path=path, ipam={"type": ipam_type}, **config)
        assert (reply.code, '"use.ipamTypes"' in reply.text) == (code, True)
        assert '"ipam.type"' in reply.text
    assert delegate.commands == []
    assert node.touched() == []


@pytest.mark.parametrize("command", ["DEL", "GC"])
@pytest.mark.parametrize("ipam_type", [ALLOWED, FORBIDDEN])
def test_executable_of_the_requests_path_is_never_started(
    node: Attacked, command: str, ipam_type: str
) -> None:
    """DEL and GC skip a plugin that no ADD can have called, so they do not fail forever."""
    delegate = Delegate.install(node.paths.state / "tenant", ipam_type)
    reply = _call(node, command, ipam_type, path=str(delegate.directory))
    assert reply.code == 0
    assert f'IPAM plugin "{ipam_type}" was not called' in reply.notes
    assert delegate.commands == []


@pytest.mark.parametrize("command", ["DEL", "GC"])
def test_removal_skips_a_type_that_is_not_allowed(node: Attacked, command: str) -> None:
    delegate = Delegate.install(node.paths.cni_bin, FORBIDDEN)
    reply = _call(node, command, FORBIDDEN)
    assert (reply.code, '"use.ipamTypes"' in reply.notes) == (0, True)
    assert delegate.commands == []


def test_journal_of_another_type_does_not_allow_it(node: Attacked) -> None:
    """DEL calls the plugin that the ADD called, not the one in the present configuration."""
    forbidden = Delegate.install(node.paths.cni_bin, FORBIDDEN)
    _attached(node, ALLOWED)
    assert _call(node, "DEL", FORBIDDEN).code == 104  # host-local is not installed
    assert forbidden.commands == []


@pytest.mark.parametrize("command", ["DEL", "GC"])
def test_addresses_of_a_plugin_that_is_no_longer_allowed_are_released(
    node: Attacked, command: str
) -> None:
    delegate = Delegate.install(node.paths.cni_bin, FORBIDDEN)
    _attached(node, FORBIDDEN)
    assert _call(node, command, FORBIDDEN, path="/what/the/runtime/has").code == 0
    assert delegate.commands == (["DEL"] if command == "DEL" else ["DEL", "GC"])
    assert delegate.calls[-1].environ["CNI_PATH"] == "/what/the/runtime/has"
    assert Journal(node.paths).read(ATTACHMENT) is None


def test_damaged_journal_starts_nothing_that_is_not_allowed_and_says_what_to_do(
    node: Attacked,
) -> None:
    delegate = Delegate.install(node.paths.cni_bin, FORBIDDEN)
    _attached(node, FORBIDDEN)
    path = Journal(node.paths).path_of(ATTACHMENT)
    path.write_bytes(path.read_bytes()[:-9])
    reply = _call(node, "DEL", FORBIDDEN)
    assert (reply.code, '"use.ipamTypes"' in reply.text) == (104, True)
    assert delegate.commands == []
    node.allow(use={"ipamTypes": [FORBIDDEN]})
    assert _call(node, "DEL", FORBIDDEN).code == 0
    assert delegate.commands == ["DEL"]


@pytest.mark.parametrize("what", ["file", "directory"])
@pytest.mark.parametrize(("owner", "mode"), [(1000, 0o755), (0, 0o777)])
def test_executable_that_others_can_write_is_not_started(
    node: Attacked, what: str, owner: int, mode: int
) -> None:
    delegate = Delegate.install(node.paths.cni_bin, ALLOWED)
    path = delegate.directory / ALLOWED if what == "file" else delegate.directory
    os.chown(path, owner, -1)
    path.chmod(mode)
    _attached(node, ALLOWED)
    reply = _call(node, "DEL", ALLOWED)
    assert (reply.code, f"chown root:root {path}" in reply.text) == (104, True)
    assert delegate.commands == []
    os.chown(path, 0, -1)
    path.chmod(0o755)
    assert _call(node, "DEL", ALLOWED).code == 0
    assert delegate.commands == ["DEL"]


def test_link_to_an_executable_of_others_is_not_started(node: Attacked, tmp_path: Path) -> None:
    theirs = Delegate.install(tmp_path / "tenant", "theirs")
    os.chown(theirs.directory / "theirs", 1000, -1)
    (node.paths.cni_bin / ALLOWED).symlink_to(theirs.directory / "theirs")
    _attached(node, ALLOWED)
    assert _call(node, "DEL", ALLOWED).code == 104
    assert list(node.paths.cni_bin.iterdir()) == [node.paths.cni_bin / ALLOWED]
    assert theirs.commands == []
