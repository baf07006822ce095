"""The parent of an attachment of `ipoib` is on an HCA that was allocated to its pod."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from host.netlink import links
from host.sysfs import infiniband
from tests.unit.attachments.choosing import OTHER, POD, ROUTE, ipoib, refusal, show, swap
from tests.unit.deviceplugin.holding import Holding
from tests.unit.host import servers
from tests.unit.host.sysfs import Tree

A, B = servers.DGX_HCAS[:2]


def test_containers_of_a_pod_see_one_answer(server: Holding) -> None:
    """A later container gets the init container's device; the order changes nothing."""
    server.give(POD, {f"{A}-0": [A]}, container="setup", init=True)
    server.give(POD, {f"{A}-0": [A]}, container="main")
    assert [ipoib(server, f"net{n}") for n in (1, 2)] == ["ib0", "ib0"]


def test_holder_of_all_has_one_attachment_on_each(server: Holding) -> None:
    server.give(POD, {"0": servers.DGX_HCAS})
    assert [ipoib(server, f"net{n}") for n in range(8)] == [f"ib{n}" for n in range(8)]


def test_token_of_all_that_multus_passes_means_each_hca_in_turn(server: Holding) -> None:
    server.give(POD, {"0": servers.DGX_HCAS, "1": servers.DGX_HCAS})
    first = [ipoib(server, f"net{n}", deviceID=token) for n, token in ((1, "0"), (2, "1"))]
    assert first == ["ib0", "ib1"]
    assert [ipoib(server, f"net{n}", deviceID=token) for n, token in ((2, "0"), (1, "1"))] == [
        "ib1",
        "ib0",
    ]
    refused = refusal(ipoib, server, "net3", deviceID="2")
    assert (refused.code, '"deviceID" is "2"' in refused.message) == (120, True)


def _down(node: Holding, number: int) -> None:
    port = f"class/infiniband/mlx5_{number}/ports/1"
    Tree(node.paths.sys, node.paths).write(f"{port}/state", "1: DOWN")


def test_parent_on_a_port_that_works_comes_first(server: Holding) -> None:
    server.give(POD, {"0": servers.DGX_HCAS[:3]})
    _down(server, 0)
    assert ipoib(server, "net1") == "ib1"
    _down(server, 1)
    assert ipoib(server, "net1") == "ib2"  # though it was on ib1 before
    _down(server, 2)
    assert ipoib(server, "net1") == "ib2"  # nothing else is better
    assert ipoib(server, "net2") == "ib0"
    assert ipoib(server, "net3", master=["ib0", "ib1"]) == "ib0"  # as in the configuration


@pytest.mark.parametrize("key", ["deviceID", "pciBusID", "runtimeConfig"])
@pytest.mark.parametrize("form", ["{}-4", "{}"], ids=["slot", "address"])
def test_device_id_chooses_among_the_pods_hcas(server: Holding, key: str, form: str) -> None:
    server.give(POD, {f"{A}-4": [A], f"{B}-4": [B]})
    known = form.format(B)
    config: dict[str, Any] = {key: {"deviceID": known} if key == "runtimeConfig" else known}
    assert ipoib(server, **config) == "ib1"


def test_device_id_that_the_pod_does_not_hold_is_refused_with_both(server: Holding) -> None:
    server.give(POD, {f"{A}-0": [A]})
    server.give(OTHER, {f"{B}-0": [B]})
    refused = refusal(ipoib, server, deviceID=f"{B}-0")
    assert refused.code == 120
    assert f'"deviceID" is "{B}-0", but pod ml/worker-0 was given {A} (mlx5_0, uverbs0' in (
        refused.message
    )


@pytest.mark.parametrize("held", [True, False])
def test_device_of_another_device_plugin_is_taken(server: Holding, held: bool) -> None:
    """The kubelet lists it for the pod, or the runtime passes it and the pod has none of ours."""
    if held:
        server.give(POD, {f"{A}-0": [A]})
        server.give(POD, {B: []}, resource="nvidia.com/hca")
    assert ipoib(server, deviceID=B) == "ib1"


def test_device_that_another_pod_has_exclusively_is_refused_with_its_resource(
    server: Holding,
) -> None:
    """Although the runtime passes it, and this pod has no HCA."""
    server.give(OTHER, {B: [B]}, resource="rdma/whole")
    refused = refusal(ipoib, server, deviceID=B)
    assert refused.code == 120
    assert refused.message.startswith(
        f'"deviceID" {B} is on HCA {B}, which the kubelet gave to another pod as rdma/whole: '
    )
    server.give(POD, {B: []}, resource="other/thing")
    assert refusal(ipoib, server, deviceID=B).code == 120
    refused = refusal(ipoib, server, master="ib1")
    assert refused.code == 120
    assert refused.message.startswith(
        f'parent "ib1" is on HCA {B}, which the kubelet gave to another pod as rdma/whole: '
    )
    assert ipoib(server, master=["ib1", "ib2"]) == "ib2"


def test_pod_without_hca_may_have_any_parent(server: Holding) -> None:
    server.give(OTHER, {f"{A}-0": [A]})
    assert ipoib(server, master="ib1") == "ib1"
    assert ipoib(server, master="ib1", cni_args="") == "ib1"


def test_auto_without_hca_or_pod_is_an_error(server: Holding) -> None:
    server.give(OTHER, {f"{A}-0": [A]})
    refused = refusal(ipoib, server)
    assert (refused.code, "pod ml/worker-0 was given no HCA" in refused.message) == (120, True)
    nameless = refusal(ipoib, server, cni_args="")
    assert (nameless.code, "K8S_POD_NAME" in nameless.message) == (4, True)


def test_auto_on_a_node_without_a_kubelet_says_that_there_is_none(server: Holding) -> None:
    shutil.rmtree(server.paths.device_plugins)
    refused = refusal(ipoib, server)
    assert (refused.code, "kubelet gives no devices to pods" in refused.message) == (120, True)
    assert ipoib(server, master="ib1") == "ib1"


def test_hca_without_parent_is_named(server: Holding, monkeypatch: pytest.MonkeyPatch) -> None:
    server.give(POD, {f"{A}-0": [A]})
    monkeypatch.setattr(links, "every", lambda route, kind="": [])
    refused = refusal(ipoib, server)
    assert refused.code == 120
    assert f"interface of the host is on an HCA of the pod ({A} (mlx5_0" in refused.message


def test_parent_of_either_port_is_on_the_hca(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = servers.multiport(root)
    show(paths, monkeypatch, "ipoib")
    node = Holding(paths)
    node.give(POD, {"x-0": []}, resource="other/thing")
    node.give(POD, {f"{servers.MULTIPORT_HCA}-0": [servers.MULTIPORT_HCA]})
    assert ipoib(node) == "ib0"
    assert ipoib(node, master="ib1") == "ib1"
    tree = Tree(paths.sys, paths)
    ib0 = links.find(ROUTE, "ib0")
    assert ib0 is not None
    assert infiniband.port_of(paths, ib0) is not None
    tree.write("class/infiniband/mlx5_0/ports/1/pkeys/0", "0x8001")
    assert ipoib(node) == "ib1"  # the first that can carry the child


@pytest.mark.parametrize("config", [{}, {"master": "ib0"}])
def test_driver_that_was_loaded_again_is_an_error_with_both_numbers(
    server: Holding, config: dict[str, Any]
) -> None:
    server.give(POD, {f"{A}-0": [A]})
    swap(server.paths, 0, 1)
    refused = refusal(ipoib, server, **config)
    assert refused.code == 120
    for named in ("uverbs0 231:192", "uverbs1 231:193 now", A):
        assert named in refused.message
