"""A tenant names files of the host in the options of another IPAM plugin, which runs as root."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cni.attachments.entry import ATTACHED, Attachment, Entry
from cni.attachments.journal import Journal
from tests.attacks.node import PASSED, Attacked
from tests.conformance.node import Delegate, namespace
from tests.unit.host import servers

VF = servers.VFS_ETHERNET[0]
ATTACHMENT = Attachment("fabric", "attacker", "net1")
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
    """A node whose administrator allows one directory."""
    with tempfile.TemporaryDirectory(prefix="pf-") as root, namespace() as netns:
        attacked = Attacked(servers.vfs(Path(root)), netns)
        attacked.paths.cni_bin.mkdir(mode=0o755)
        attacked.allow(ipam_directories=["/run/cni/ipam"])
        yield attacked


@pytest.mark.parametrize("options", PATHS.values(), ids=list(PATHS))
def test_path_in_the_options_of_another_ipam_plugin_is_refused(
    node: Attacked, options: dict[str, Any]
) -> None:
    ipam = {"type": "host-local", **options}
    delegate = Delegate.install(node.paths.cni_bin, ipam["type"])
    for command, code in (("ADD", 121), ("STATUS", 50)):
        reply = node.call(command, ipam=ipam, deviceID=VF)
        assert (reply.code, '"policy.ipam_directories"' in reply.text) == (code, True)
    reply = node.call("DEL", ipam=ipam)
    assert (reply.code, '"policy.ipam_directories"' in reply.notes) == (0, True)
    assert delegate.commands == []
    assert node.touched() == []


def test_addresses_are_no_paths_and_an_allowed_directory_is_used(node: Attacked) -> None:
    Delegate.install(node.paths.cni_bin, "host-local")
    ipam = {"type": "host-local", **HARMLESS, "dataDir": "/run/cni/ipam/fabric"}
    assert PASSED in node.call("ADD", ipam=ipam, deviceID=VF).text


def test_delete_asks_where_the_add_has_reserved_and_nowhere_else(node: Attacked) -> None:
    """Whatever the definition names by now: the ADD's options were allowed."""
    delegate = Delegate.install(node.paths.cni_bin, "host-local")
    Journal(node.paths).write(
        Entry(
            plugin="sriov",
            network=ATTACHMENT.network,
            container_id=ATTACHMENT.container_id,
            ifname=ATTACHMENT.ifname,
            netns="/nowhere/ns",
            netns_identity="cookie:0",
            boot_id="another boot",
            phase=ATTACHED,
            config='{"name":"fabric","type":"sriov","ipam":{"type":"host-local","dataDir":"/a"}}',
        )
    )
    assert node.call("DEL", ipam={"type": "host-local", "dataDir": "/etc/cron.d"}).code == 0
    assert delegate.commands == ["DEL"]
    assert json.loads(delegate.calls[0].stdin)["ipam"] == {"type": "host-local", "dataDir": "/a"}
