"""A tenant names files of the host in the options of another IPAM plugin, which runs as root."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.node import PASSED, Attacked
from tests.conformance.node import Delegate
from tests.netns import namespace
from tests.unit.host import servers

VF = servers.VFS_ETHERNET[0]
PATHS: dict[str, dict[str, Any]] = {
    "host-local": {"dataDir": "/etc/cron.d"},
    "host-local, another case": {"DATADIR": "/etc/cron.d"},
    "host-local, from its own directory": {"dataDir": "etc"},
    "host-local, DNS": {"resolvConf": "/root/.ssh/id_rsa"},
    "dhcp": {"type": "dhcp", "daemonSocketPath": "/run/evil.sock"},
    "whereabouts, commands": {
        "type": "whereabouts",
        "kubernetes": {"kubeconfig": "/var/lib/kubelet/pods/x/kubeconfig"},
    },
    "whereabouts, log": {"type": "whereabouts", "log_file": "/etc/passwd"},
    "whereabouts, server": {"type": "whereabouts", "etcd_host": "http://169.254.169.254/"},
    "out of an allowed directory": {"dataDir": "/run/cni/ipam/../../../etc"},
    "beside an allowed directory": {"dataDir": "/run/cni/ipam-evil"},
    "any key": {"anything": [{"deep": "/dev/zero"}]},
}
HARMLESS: dict[str, Any] = {
    "range": "10.0.0.5-10.0.0.9/24",
    "ranges": [[{"subnet": "10.1.0.0/16", "gateway": "10.1.0.1"}]],
    "exclude": ["10.0.0.7/32", "fd00::/126"],
    "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0", "gw": "fd00::1"}],
}


@pytest.fixture
def node() -> Iterator[Attacked]:
    """A node that allows one directory."""
    with tempfile.TemporaryDirectory(prefix="pf-") as root, namespace() as netns:
        attacked = Attacked(servers.vfs(Path(root)), netns)
        attacked.paths.cni_bin.mkdir(mode=0o755)
        attacked.allow(set={"hostPaths": ["/run/cni/ipam"]})
        yield attacked


@pytest.mark.parametrize("options", PATHS.values(), ids=list(PATHS))
def test_path_in_the_options_of_another_ipam_plugin_is_refused(
    node: Attacked, options: dict[str, Any]
) -> None:
    ipam = {"type": "host-local", **options}
    delegate = Delegate.install(node.paths.cni_bin, ipam["type"])
    for command, code in (("ADD", 121), ("STATUS", 50)):
        reply = node.call(command, ipam=ipam, deviceID=VF)
        assert (reply.code, '"set.hostPaths"' in reply.text) == (code, True)
    reply = node.call("DEL", ipam=ipam)
    assert (reply.code, '"set.hostPaths"' in reply.notes) == (0, True)
    assert delegate.commands == []
    assert node.touched() == []


AMBIGUOUS: dict[str, str] = {
    "options in other letters": '"ipam": {"type": "host-local"}, "IPAM": {"dataDir": "/etc"}',
    "options twice": '"ipam": {"dataDir": "/etc"}, "ipam": {"type": "host-local"}',
    "a network's name that is a path": '"ipam": {"type": "host-local"}, "NAME": "../../../etc"',
    "a letter that folds to another": '"ipam": {"type": "host-local", "re\u017folvConf": "etc"}',
    "an option twice": '"ipam": {"type": "host-local", "datadir": "a", "dataDir": ""}',
    "a path that looks like a range": '"ipam": {"type": "host-local", "x": "/etc/x-10.0.0.0/24"}',
    "only in other letters": '"IPAM": {"type": "host-local", "dataDir": "/etc"}',
}


@pytest.mark.parametrize("keys", AMBIGUOUS.values(), ids=list(AMBIGUOUS))
def test_key_that_go_reads_as_another_key_cannot_bypass_the_rule(node: Attacked, keys: str) -> None:
    """Go's decoder, which other plugins use, merges keys that differ only in case."""
    delegate = Delegate.install(node.paths.cni_bin, "host-local")
    raw = f'{{"cniVersion": "1.1.0", "name": "fabric", "deviceID": "{VF}", {keys}}}'.encode()
    assert node.call("ADD", raw=raw).code in (7, 121)
    assert node.call("DEL", raw=raw).code == 0
    assert delegate.commands == []
    assert node.touched() == []


def test_addresses_are_not_taken_for_paths_and_an_allowed_directory_is_used(node: Attacked) -> None:
    Delegate.install(node.paths.cni_bin, "host-local")
    ipam = {"type": "host-local", **HARMLESS, "dataDir": "/run/cni/ipam/fabric"}
    assert PASSED in node.call("ADD", ipam=ipam, deviceID=VF).text


def test_delete_reads_only_the_directory_that_the_add_used(node: Attacked) -> None:
    """DEL uses the ADD's options, which were allowed, not those of the present definition."""
    delegate = Delegate.install(node.paths.cni_bin, "host-local")
    node.has_attached('{"type":"host-local","dataDir":"/a"}')
    assert node.call("DEL", ipam={"type": "host-local", "dataDir": "/etc/cron.d"}).code == 0
    assert delegate.commands == ["DEL"]
    assert json.loads(delegate.calls[0].stdin)["ipam"] == {"type": "host-local", "dataDir": "/a"}


def test_delete_with_differently_spelt_options_uses_those_of_the_add(node: Attacked) -> None:
    delegate = Delegate.install(node.paths.cni_bin, "host-local")
    node.has_attached('{"type":"host-local"}')
    reply = node.call("DEL", ipam={"type": "host-local"}, IPAM={"dataDir": "/etc/cron.d"})
    assert (reply.code, delegate.commands) == (0, ["DEL"])
    assert "IPAM" not in json.loads(delegate.calls[0].stdin)
