"""A tenant's pod tries to get a device that is for another pod, or a whole HCA."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cni.attachments.journal import Journal, JournalEntry, Phase
from deviceplugin import checkpoint
from host.namespaces import NetworkNamespace
from host.sysfs import pci
from tests.attacks.node import OTHER, PASSED, TENANT, Attacked
from tests.kubelet import Kubelet
from tests.netns import namespace
from tests.unit.host import servers
from tests.unit.host.sysfs import Tree

PF, MASTER = servers.VFS_ETHERNET_PF, "enp59s0f1np0"
VF, SECOND, THIRD = servers.VFS_ETHERNET[:3]
POOL = "rdma/vf"


@pytest.fixture
def node() -> Iterator[Attacked]:
    """A card whose VFs are all free."""
    with tempfile.TemporaryDirectory(prefix="pf-") as root, namespace() as netns:
        yield Attacked(servers.vfs(Path(root)), netns)


PLACES: list[dict[str, Any]] = [
    {"deviceID": VF},
    {"pciBusID": VF},
    {"runtimeConfig": {"deviceID": VF}},
    {"deviceID": f"{VF}-7"},
    {"deviceID": VF.removeprefix("0000:").upper()},
]


@pytest.mark.parametrize("config", PLACES)
def test_device_of_a_pool_is_refused_by_every_key_that_can_name_it(
    node: Attacked, config: dict[str, Any]
) -> None:
    node.registered = {POOL: [VF, SECOND]}
    node.write()
    for pod in (TENANT, None):  # cnitool calls for a pod without devices
        reply = node.call(pod=pod, **config)
        assert reply.code == 121
        for told in (f'"{next(iter(config))}', VF, POOL, '"set.unassigned_devices"'):
            assert told in reply.text
        assert node.touched() == []
    node.allow(set={"unassigned_devices": [True]})
    assert PASSED in node.call(**config).text


@pytest.mark.parametrize(
    "device_id",
    [VF, VF.upper(), f"{VF}-3", VF.replace(":", "-").replace(".", "-"), "mlx5_6", "mlx5_6-1"],
)
def test_other_device_plugins_ids_name_the_same_device(node: Attacked, device_id: str) -> None:
    assert pci.rdma_of(node.paths, VF) == ("mlx5_6",)
    node.registered = {"vendor.example/nic": [device_id]}
    node.write()
    assert node.call(deviceID=VF).code == 121
    assert PASSED in node.call(deviceID=SECOND).text
    node.registered = {}
    node.give(OTHER, {device_id: []}, resource="vendor.example/nic")
    assert node.call(deviceID=VF).code in (120, 121)
    assert node.call(master=MASTER).text.count(VF) == 0  # another VF was tried
    node.held.clear()
    node.give(TENANT, {device_id: []}, resource="vendor.example/nic")
    assert PASSED in node.call(deviceID=VF).text


def test_id_that_names_no_device_protects_nothing(node: Attacked) -> None:
    node.registered = {"vendor.example/nic": ["17", "GPU-3b00-00", "some thing"]}
    node.write()
    assert PASSED in node.call(deviceID=VF).text


def test_software_device_of_a_pool_protects_its_function(node: Attacked) -> None:
    tree = Tree(node.paths.sys, node.paths)
    tree.soft_rdma("rxe0", "enp59s0f1v0")
    node.registered = {POOL: ["rxe0-0", "rxe0-1"]}
    node.write()
    assert node.call(deviceID=VF).code == 121


def test_our_pool_keeps_its_devices_while_the_kubelet_lists_none(node: Attacked) -> None:
    """No device is healthy, or the agent has just started. A token names no device."""
    node.registered = {POOL: ["0", "1"]}
    node.write()
    assert PASSED in node.call(deviceID=VF).text
    checkpoint.write(node.paths, [], {POOL: [VF]})
    assert node.call(deviceID=VF).code == 121


def test_master_skips_devices_of_pools_and_names_them_if_none_is_left(
    node: Attacked,
) -> None:
    node.registered = {POOL: [VF, SECOND, THIRD]}
    node.write()
    reply = node.call(master=MASTER)
    assert (PASSED in reply.text, servers.VFS_ETHERNET[3] in reply.text) == (True, True)
    for vf in (VF, SECOND, THIRD):
        assert vf not in reply.text
    node.registered[POOL].append(servers.VFS_ETHERNET[3])
    node.write()
    reply = node.call(master=MASTER)
    assert reply.code == 121
    for told in ('"master"', VF, POOL, '"set.unassigned_devices"'):
        assert told in reply.text
    assert node.touched() == []


def test_pool_of_a_pf_excludes_its_vfs(node: Attacked) -> None:
    node.registered = {"rdma/pf": [PF]}
    node.write()
    assert PASSED in node.call(deviceID=VF).text
    node.allow(set={"pfOnly": [True]})
    reply = node.call(deviceID=PF, pfOnly=True)
    assert (reply.code, '"set.unassigned_devices"' in reply.text) == (121, True)


def test_whole_pf_needs_the_rule_also_if_no_pool_has_it(node: Attacked) -> None:
    places: list[dict[str, Any]] = [{"deviceID": PF}, {"master": MASTER}]
    for config in places:
        reply = node.call(pfOnly=True, **config)
        assert (reply.code, '"set.pfOnly"' in reply.text) == (121, True)
        assert '"pfOnly": true' in reply.text
    node.allow(set={"pfOnly": [True]})
    assert "write 0 to its sriov_numvfs first" in node.call(pfOnly=True, deviceID=PF).text


@pytest.mark.parametrize("plugin", ["sriov", "ipoib"])
def test_match_device_false_needs_the_rule(node: Attacked, plugin: str) -> None:
    config: dict[str, Any] = {"deviceID": VF} if plugin == "sriov" else {"master": "ib0"}
    reply = node.call(plugin=plugin, match_device=False, **config)
    assert (reply.code, '"set.match_device"' in reply.text) == (121, True)
    assert node.touched() == []


def test_match_device_false_takes_no_device_that_another_pod_has_exclusively(
    node: Attacked,
) -> None:
    node.give(OTHER, {VF: [VF]}, resource=POOL)
    node.allow(set={"match_device": [False]})
    reply = node.call(deviceID=VF, match_device=False)
    assert (reply.code, '"set.unassigned_devices"' in reply.text) == (121, True)
    assert OTHER.name not in reply.text
    assert PASSED in node.call(deviceID=SECOND, match_device=False).text
    node.allow(set={"match_device": [False], "unassigned_devices": [True]})
    assert PASSED in node.call(deviceID=VF, match_device=False).text


@pytest.mark.parametrize("settings", [{}, {"unassigned_devices": [True]}])
def test_device_that_another_pod_has_exclusively_is_refused(
    node: Attacked, settings: dict[str, list[bool]]
) -> None:
    node.give(OTHER, {VF: [VF]}, resource=POOL)
    node.allow(set=settings)
    reply = node.call(deviceID=VF)
    assert (reply.code, POOL in reply.text, OTHER.name in reply.text) == (120, True, False)
    assert node.touched() == []


DAMAGE = ["kubelet's gone", "kubelet's damaged", "ours damaged"]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    ("plugin", "config"),
    [
        ("sriov", {"deviceID": VF}),
        ("sriov", {"master": MASTER}),
        ("sriov", {"deviceID": VF, "match_device": False}),
        ("ipoib", {"master": "ib0"}),
        ("ipoib", {"master": "ib0", "match_device": False}),
    ],
)
@pytest.mark.parametrize("pod", [TENANT, None])
def test_no_device_is_given_while_records_cannot_be_read(
    node: Attacked,
    damage: str,
    plugin: str,
    config: dict[str, Any],
    pod: Any,  # noqa: ANN401
) -> None:
    node.give(OTHER, {VF: [VF]}, resource=POOL)
    node.allow(set={"match_device": [False], "unassigned_devices": [True]})
    if damage == "kubelet's gone":
        node.kubelets_checkpoint.unlink()
    elif damage == "kubelet's damaged":
        node.kubelets_checkpoint.write_text("{")
    else:
        node.paths.checkpoint.write_text('{"version": 1, "allo')
    reply = node.call(plugin=plugin, pod=pod, **config)
    assert reply.code == 11
    assert "checkpoint" in reply.text
    assert node.touched() == []
    status = node.call("STATUS", plugin=plugin, pod=None, **config)
    assert (status.code, "checkpoint" in status.text) == (50, True)


def test_lost_checkpoint_of_a_kubelet_with_allocations_is_noticed_by_asking_it(
    node: Attacked,
) -> None:
    """Our own checkpoint does not help: other device plugins serve this node."""
    node.give(OTHER, {VF: []}, resource="vendor.example/nic")
    node.paths.checkpoint.unlink()
    node.kubelets_checkpoint.unlink()
    with Kubelet(node.paths.kubelet) as kubelet:
        kubelet.checkpoint.unlink(missing_ok=True)
        assert PASSED in node.call(deviceID=SECOND).text  # no device was ever allocated
        kubelet.hold(node.held, node.pods)
        kubelet.checkpoint.unlink()
        reply = node.call(deviceID=VF)
        assert (reply.code, "has no checkpoint of the kubelet" in reply.text) == (11, True)


def test_node_without_a_kubelet_gives_any_device(node: Attacked) -> None:
    shutil.rmtree(node.paths.kubelet)
    for pod in (TENANT, None):
        assert PASSED in node.call(pod=pod, deviceID=VF).text
        assert PASSED in node.call(pod=pod, master=MASTER).text


def test_unreadable_rules_allow_no_device(node: Attacked) -> None:
    node.allow()
    node.paths.config.write_text("policy: [")
    reply = node.call(deviceID=VF)
    assert (reply.code, str(node.paths.config) in reply.text) == (5, True)
    assert node.call("DEL", deviceID=VF).code == 0


def test_delete_and_gc_ignore_the_rules(node: Attacked) -> None:
    node.registered = {POOL: [VF]}
    node.write()
    forbidden: dict[str, Any] = {"deviceID": VF, "match_device": False, "pfOnly": True}
    assert node.call("DEL", **forbidden).code == 0
    assert node.call("GC", **forbidden | {"cni.dev/valid-attachments": []}).code == 0
    node.kubelets_checkpoint.write_text("{")
    assert node.call("DEL", **forbidden).code == 0


def test_status_reports_what_the_rules_would_refuse(node: Attacked) -> None:
    forbidden: list[dict[str, Any]] = [{"match_device": False}, {"pfOnly": True}]
    for config in forbidden:
        reply = node.call("STATUS", pod=None, master=MASTER, **config)
        assert (reply.code, '"set.' in reply.text) == (50, True)
    reply = node.call("STATUS", "ipoib", None, master="ib0", match_device=False)
    assert (reply.code, '"set.match_device"' in reply.text) == (50, True)


@pytest.mark.parametrize("damaged", [False, True])
def test_error_names_no_other_pod_and_no_container(node: Attacked, damaged: bool) -> None:
    with NetworkNamespace.open("/proc/self/ns/net") as own:
        entry = JournalEntry(
            plugin="sriov",
            network="fabric",
            container_id="0123456789abcdef",
            ifname="net7",
            netns="/proc/self/ns/net",
            netns_identity=own.identity,
            boot_id=node.paths.boot_id(),
            phase=Phase.ATTACHED,
            pod_namespace=OTHER.namespace,
            pod_name=OTHER.name,
            since="2026-01-02T03:04:05+00:00",
            device=VF,
            addresses=("10.9.0.7/24",),
        )
    journal = Journal(node.paths)
    journal.write(entry)
    if damaged:
        path = journal.path_of(entry.attachment)
        path.write_bytes(path.read_bytes().replace(b'"net7"', b'"net8"'))
    told = [node.call(deviceID=VF), node.call(deviceID=SECOND, ipam={"type": "podfabric-ipam"})]
    assert [reply.code for reply in told] == [113 if damaged else 11, 11]
    for reply in told:
        for name in (OTHER.namespace, OTHER.name, entry.container_id, "net7", "net8"):
            assert name not in reply.text
    assert entry.container_id in told[0].notes


def test_rule_that_is_misspelt_allows_nothing(node: Attacked) -> None:
    node.allow(unassigned_device=True)
    assert node.call(deviceID=VF).code == 5
