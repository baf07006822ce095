"""A tenant with its own rules tries another tenant's devices: refused before anything is done."""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from base.pod import Pod
from tests.attacks.node import OTHER, PASSED, TENANT, Attacked
from tests.netns import namespace
from tests.runtime import CHECKOUT
from tests.unit.host import servers

PF, MASTER = servers.VFS_ETHERNET_PF, "enp59s0f1np0"
OWN, THEIRS = servers.VFS_ETHERNET[0], servers.VFS_ETHERNET[2]
LOGS = "/var/log/podfabric"
RANGE = {"type": "podfabric-ipam", "network_name": "tenant-1", "range": "10.1.0.0/24"}
RULES = [
    {
        "name": "own",
        "subjects": [{"namespaces": [TENANT.namespace]}],
        "use": {
            "devices": [{"pfNames": [f"{MASTER}#0-1"]}],
            "pkeys": ["0x8001"],
            "vlans": [0, "100-109"],
            "guids": ["02:00:00:00:00:00:00:00-02:00:00:00:00:00:00:ff"],
            "macs": ["02:00:00:00:00:00-02:00:00:00:00:ff"],
            "ipamTypes": ["podfabric-ipam", "host-local"],
            "networkNames": ["tenant-*"],
            "ranges": ["10.1.0.0/16"],
            "addressesPerAttachment": 1,
        },
    },
    {
        "name": "theirs",
        "subjects": [{"namespaces": [OTHER.namespace]}],
        "use": {
            "devices": [{"pfNames": [f"{MASTER}#2-3"]}],
            "pkeys": ["0x8002"],
            "vlans": ["200-209"],
            "ipamTypes": ["*"],
            "networkNames": ["*"],
            "ranges": ["*"],
        },
        "set": {"trust": [True], "pfOnly": [True], "hostPaths": [LOGS]},
    },
]


@pytest.fixture
def node() -> Iterator[Attacked]:
    """A card whose VFs are all free, and rules for two tenants."""
    with tempfile.TemporaryDirectory(prefix="pf-") as root, namespace() as netns:
        made = Attacked(servers.vfs(Path(root)), netns)
        made.allow(rules=RULES)
        yield made


OWN_USE: list[dict[str, Any]] = [
    {},
    {"vlan": 100},
    {"mac": "02:00:00:00:00:07"},
    {"guid": "02:00:00:00:00:00:00:07"},
    {"pkey": "0x8001"},
    {"ipam": RANGE},
    {"ipam": RANGE, "runtimeConfig": {"ips": ["10.1.0.7"]}},
]


@pytest.mark.parametrize("config", OWN_USE, ids=str)
def test_tenant_gets_what_its_rules_allow(node: Attacked, config: dict[str, Any]) -> None:
    assert PASSED in node.call(deviceID=OWN, **config).text


ATTACKS: list[tuple[str, dict[str, Any]]] = [
    ("deviceID", {"deviceID": THEIRS}),
    ("pciBusID", {"pciBusID": THEIRS}),
    ("runtimeConfig.deviceID", {"runtimeConfig": {"deviceID": THEIRS}}),
    ("pkey", {"pkey": "0x8002"}),
    ("pkey", {"pkey": 0x0001}),
    ("PKey", {"PKey": "0x8002"}),
    ("vlan", {"vlan": 200}),
    ("VLAN", {"VLAN": 200}),
    ("mac", {"mac": "02:00:00:00:01:00"}),
    ("runtimeConfig.mac", {"runtimeConfig": {"mac": "02:00:00:00:01:00"}}),
    ("args.cni.mac", {"args": {"cni": {"mac": "02:00:00:00:01:00"}}}),
    ("guid", {"guid": "02:00:00:00:00:00:01:00"}),
    ("runtimeConfig.guid", {"runtimeConfig": {"infinibandGUID": "02:00:00:00:00:00:01:00"}}),
    ("args.cni.guid", {"args": {"cni": {"guid": "02:00:00:00:00:00:01:00"}}}),
    ("trust", {"trust": "on"}),
    ("spoofchk", {"spoofchk": "off"}),
    ("pfOnly", {"deviceID": PF, "pfOnly": True}),
    ("match_device", {"match_device": False}),
    ("ipam.type", {"ipam": {"type": "static", "addresses": [{"address": "10.1.0.1/24"}]}}),
    ("ipam.type", {"ipam": {"type": "whereabouts", "range": "10.1.0.0/24"}}),
    ("ipam.network_name", {"ipam": {**RANGE, "network_name": "victims-1"}}),
    ("ipam.range", {"ipam": {**RANGE, "range": "10.2.0.0/24"}}),
    ("ipam.range", {"ipam": {**RANGE, "range": "10.0.0.0/8"}}),
    ("runtimeConfig.ipRanges", {"runtimeConfig": {"ipRanges": [[{"subnet": "10.2.0.0/24"}]]}}),
    ("count", {"ipam": {**RANGE, "ipRanges": [{"range": "10.1.1.0/24"}]}}),
    ("dataDir", {"ipam": {"type": "host-local", "dataDir": LOGS}}),
    ("ipam.scope", {"ipam": {**RANGE, "scope": "node"}}),
]


@pytest.mark.parametrize(("what", "config"), ATTACKS, ids=str)
def test_what_only_another_tenant_may_have_is_refused_before_anything_is_locked(
    node: Attacked, what: str, config: dict[str, Any]
) -> None:
    given = {"deviceID": OWN, **config}
    if "pciBusID" in config or "deviceID" in config.get("runtimeConfig", {}):
        del given["deviceID"]
    if what == "runtimeConfig.ipRanges":
        given["ipam"] = {"type": "podfabric-ipam"}
    reply = node.call(**given)
    assert reply.code == 121, (what, reply.text)
    assert "(own)" in reply.text and "theirs" not in reply.text
    # A device is examined under its own lock, for which the pod's other attachments wait.
    assert not [path for path in node.touched() if path.startswith("attachments")]


def test_the_example_of_policy_md_keeps_tenants_apart(node: Attacked) -> None:
    page = (CHECKOUT / "docs/use/policy.md").read_text()
    section = page.partition("## Isolation on the fabric")[2]
    text = re.findall(r"```yaml\n(.*?)```", section, re.S)[0]
    text = text.replace("ens1f0#0-3", f"{MASTER}#0-1").replace("ens1f0#4-7", f"{MASTER}#2-3")
    node.allow(rules=yaml.safe_load(text)["policy"]["rules"])
    for tenant, own, theirs in (("team-a", OWN, "0x8002"), ("team-b", THEIRS, "0x8001")):
        pod = Pod(tenant, "pod", "uid")
        assert PASSED in node.call(pod=pod, deviceID=own).text
        reply = node.call(pod=pod, deviceID=own, pkey=theirs)
        assert (reply.code, f"({tenant})" in reply.text) == (121, True)
        assert node.call(pod=pod, deviceID=THEIRS if own == OWN else OWN).code == 121


def test_a_master_yields_the_vfs_of_the_rule_alone(node: Attacked) -> None:
    text = node.call(master=MASTER).text
    assert PASSED in text
    refused = [part for part in text.split("; ") if "is not allowed" in part]
    assert len(refused) == 2 and all("use.devices" in part for part in refused)


def test_the_namespace_is_the_one_that_the_runtime_gave(node: Attacked) -> None:
    claimed: dict[str, Any] = {
        "args": {"cni": {"K8S_POD_NAMESPACE": OTHER.namespace}},
        "namespace": "victims",
    }
    assert node.call(deviceID=THEIRS, **claimed).code == 121
    assert PASSED in node.call(pod=OTHER, deviceID=THEIRS, vlan=200).text
    assert node.call(pod=OTHER, deviceID=OWN).code == 121


def test_an_addition_to_a_definition_cannot_lend_a_value_of_another_rule(node: Attacked) -> None:
    both = [
        {**RULES[0], "name": "a"},
        {**RULES[1], "name": "b", "subjects": RULES[0]["subjects"]},
    ]
    node.allow(rules=both)
    assert PASSED in node.call(deviceID=OWN, pkey="0x8001").text
    assert PASSED in node.call(deviceID=THEIRS, pkey="0x8002").text
    crossed = node.call(deviceID=THEIRS, pkey="0x8001")
    assert (crossed.code, "(a)" in crossed.text) == (121, True)


def test_a_namespace_without_rules_has_what_the_node_allows_all_others(node: Attacked) -> None:
    stranger = Pod("strangers", "pod", "uid")
    assert PASSED in node.call(pod=stranger, deviceID=OWN, trust="on").text
    refused = node.call(pod=stranger, deviceID=PF, pfOnly=True)
    assert (refused.code, '(config.yaml) lists it in "set.pfOnly"' in refused.text) == (121, True)


def test_removal_ignores_the_rules(node: Attacked) -> None:
    node.has_attached('{"type":"podfabric-ipam","range":"10.99.0.0/24"}')
    assert node.call("DEL", deviceID=THEIRS, trust="on", pkey="0x8002").code == 0


def test_a_node_whose_rules_cannot_be_read_attaches_nothing(node: Attacked) -> None:
    node.allow(rules=[{"name": "own"}])
    reply = node.call(deviceID=OWN)
    assert (reply.code, "policy.rules[0].subjects: is missing" in reply.text) == (5, True)


def test_status_is_not_refused_for_what_some_pod_may_have(node: Attacked) -> None:
    assert node.call("STATUS", pfOnly=True, deviceID=PF).code != 121
    assert '"pfOnly"' not in node.call("STATUS", pfOnly=True, deviceID=PF).text
    assert '"match_device"' in node.call("STATUS", match_device=False, deviceID=OWN).text
