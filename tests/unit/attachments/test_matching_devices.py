"""An attachment of `sriov` gets a device that was allocated to its pod."""

import shutil

import pytest

from base.types import DeviceId
from deviceplugin.kubelet import records
from policy import rules
from tests.unit.attachments.choosing import CNI_ARGS, OTHER, POD, refusal, sriov, swap
from tests.unit.deviceplugin.holding import Holding
from tests.unit.host import servers
from tests.unit.host.sysfs import Tree

VF, OTHER_VF = servers.VFS_ETHERNET[:2]
VFS = list(servers.VFS_ETHERNET)
UNASSIGNED = rules.of({"set": {"unassigned_devices": [True]}}, "config.yaml")
ANY = rules.of({"set": {"match_device": [False], "unassigned_devices": [True]}}, "config.yaml")


def test_device_of_a_resource_claim_is_the_pods(
    card: Holding, monkeypatch: pytest.MonkeyPatch
) -> None:
    card.give(POD, {VF: [VF]})
    assert refusal(sriov, card, deviceID=OTHER_VF).code == 120
    row = records.PodDevices(
        namespace="ml",
        name="worker-0",
        uid="",
        container="main",
        resource="dra.net/node-1",
        ids=(DeviceId("0000-3c-00-3"), DeviceId(OTHER_VF)),
        claimed=True,
    )
    monkeypatch.setattr(records, "from_pod_resources", lambda *given, **more: [row])
    assert sriov(card, deviceID=OTHER_VF) == OTHER_VF


def test_vf_of_another_pod_is_refused_with_both(card: Holding) -> None:
    card.give(POD, {VF: [VF]})
    card.give(OTHER, {OTHER_VF: [OTHER_VF]})
    refused = refusal(sriov, card, deviceID=OTHER_VF)
    assert refused.code == 120
    assert refused.message == (
        f"device {OTHER_VF} is on HCA {OTHER_VF} (mlx5_7), but pod ml/worker-0 was given {VF} "
        '(mlx5_6, uverbs6 231:198) of rdma/hca: remove "deviceID" and "master", or '
        'set "match_device": false if this is intended'
    )
    assert sriov(card, deviceID=OTHER_VF, match_device=False, policy=ANY) == OTHER_VF


def test_free_vf_of_a_master_is_not_allocated(card: Holding) -> None:
    card.give(OTHER, {VF: [VF]})
    assert sriov(card, master="enp59s0f1np0") == OTHER_VF


@pytest.mark.parametrize("ids", [{"0": VFS}, {f"{vf}-0": [vf] for vf in VFS}])
def test_vfs_that_others_share_are_free_for_a_master_if_the_rules_say_so(
    card: Holding, ids: dict[str, list[str]]
) -> None:
    card.give(OTHER, ids)
    assert sriov(card, master="enp59s0f1np0", policy=UNASSIGNED) == VF


def test_master_without_a_free_vf_names_the_resources_that_have_them(card: Holding) -> None:
    for number, vf in enumerate(VFS):
        card.give(OTHER, {vf: [vf]}, resource=f"rdma/vf{number % 2}")
    refused = refusal(sriov, card, master="enp59s0f1np0")
    assert refused.code == 11
    for number, vf in enumerate(VFS):
        assert f"{vf} as rdma/vf{number % 2}" in refused.message
    assert "of enp59s0f1np0 to other pods" in refused.message
    assert "driver" not in refused.message


def test_pod_with_other_hcas_gets_no_vf_of_a_master(card: Holding) -> None:
    card.give(POD, {servers.VFS[0]: [servers.VFS[0]]})
    refused = refusal(sriov, card, master="enp59s0f1np0")
    assert (refused.code, f"was given {servers.VFS[0]}" in refused.message) == (120, True)


def test_error_for_a_pod_with_hcas_but_no_vf_names_them(card: Holding) -> None:
    card.give(POD, {f"{servers.VFS_PF}-0": [servers.VFS_PF]})
    refused = refusal(sriov, card)
    assert refused.code == 120
    assert f"was given {servers.VFS_PF} (mlx5_0" in refused.message
    assert (
        sriov(card, pfOnly=True, policy=rules.of({"set": {"pfOnly": [True]}}, "config.yaml"))
        == servers.VFS_PF
    )


def test_sf_is_a_device_like_a_vf(card: Holding) -> None:
    card.give(POD, {servers.VFS_SF: [servers.VFS_SF]})
    assert sriov(card) == servers.VFS_SF


def test_pod_without_an_allocation_needs_a_device(card: Holding) -> None:
    refused = refusal(sriov, card)
    assert (refused.code, '"deviceID" is missing' in refused.message) == (7, True)
    assert "no kubelet" not in refused.message


def test_pod_of_a_node_without_a_kubelet_needs_a_device_and_is_told_so(card: Holding) -> None:
    shutil.rmtree(card.paths.device_plugins)
    refused = refusal(sriov, card)
    assert (refused.code, '"deviceID" is missing' in refused.message) == (7, True)
    assert f"this node's kubelet gives no devices to pods: {card.paths.device_plugins}" in (
        refused.message
    )


def test_token_of_all_is_each_vf_of_the_pool_in_turn(card: Holding) -> None:
    card.give(POD, {"0": [VF, OTHER_VF], "1": [VF, OTHER_VF]})
    card.give(POD, {servers.VFS[0]: [servers.VFS[0]]}, resource="rdma/other")
    tokens = {"net1": "1", "net2": "0"}
    assert [sriov(card, name, deviceID=token) for name, token in tokens.items()] == [VF, OTHER_VF]
    assert sriov(card, "net2", deviceID="0") == OTHER_VF


@pytest.mark.parametrize("cni_args", [CNI_ARGS, ""])
def test_unknown_device_id_is_an_error(card: Holding, cni_args: str) -> None:
    refused = refusal(sriov, card, cni_args=cni_args, deviceID="0", master="enp59s0f1np0")
    assert (
        refused.code,
        '"deviceID": "0" is not a device: give a PCI address' in refused.message,
    ) == (
        7,
        True,
    )


def _without_uverbs(tree: Tree, address: str) -> None:
    device = tree.device(address)
    for kind in ("infiniband_verbs", "infiniband_mad", "infiniband"):
        for entry in list((device / kind).iterdir()) if (device / kind).exists() else []:
            (tree.root / "class" / kind / entry.name).unlink()
            entry.rename(tree.root / f"gone-{entry.name}")


def test_device_without_an_rdma_device_is_not_compared(card: Holding) -> None:
    _without_uverbs(Tree(card.paths.sys, card.paths), VF)
    card.give(POD, {servers.VFS[0]: [servers.VFS[0]]})
    assert sriov(card, deviceID=VF) == VF
    assert sriov(card, master="enp59s0f1np0") == VF
    assert sriov(card) == servers.VFS[0]


def test_pod_with_other_hcas_gets_a_vf_of_a_master_only_if_that_has_no_rdma_device(
    card: Holding,
) -> None:
    """The first VF has one, the second has none: docs/use/vfs.md, "Devices that a pod may have"."""
    _without_uverbs(Tree(card.paths.sys, card.paths), OTHER_VF)
    card.give(POD, {servers.VFS[0]: [servers.VFS[0]]})
    assert sriov(card, master="enp59s0f1np0") == OTHER_VF


def test_vf_whose_driver_was_bound_again_is_an_error_with_both_numbers(card: Holding) -> None:
    card.give(POD, {VF: [VF]})
    swap(card.paths, 6, 7)
    refused = refusal(sriov, card)
    assert refused.code == 120
    for named in ("uverbs6 231:198", "uverbs7 231:199 now", VF):
        assert named in refused.message
