"""`podfabric devices` on made-up servers: what pools offer, and why not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from base.paths import Paths
from base.types import DeviceId
from deviceplugin import checkpoint
from deviceplugin.checkpoint import AllocatedHCA, AllocatedRdmaDevice, Allocation
from tests.unit.cli.commands import Shell
from tests.unit.host import servers
from tests.unit.host.sysfs import Tree

ShellOf = Callable[[Paths], Shell]

TWO_POOLS = """
pools:
  - name: rdma/vf
    mode: exclusive
    selectors: [{pfNames: ["ib0#0-1"]}]
  - name: rdma/eth
    mode: shared
    slots: 4
    selectors: [{linkTypes: [ether], drivers: [mlx5_core]}]
"""


@pytest.fixture
def shell_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Paths], Shell]:
    return lambda paths: Shell(paths, monkeypatch, capsys)


def _configured(paths: Paths, text: str) -> None:
    paths.etc.mkdir(exist_ok=True)
    paths.config.write_text(text)


def _allocated(
    paths: Paths, *keys: tuple[str, str, str], rdma: tuple[AllocatedRdmaDevice, ...] = ()
) -> None:
    """Resource, device id, HCA of each."""
    checkpoint.write(
        paths,
        [
            checkpoint.encode(
                Allocation(
                    resource=resource,
                    id=DeviceId(known),
                    devices=(AllocatedHCA(id=hca, address=hca, netdevs=(), rdma=rdma),),
                    time="2026-11-21T19:12:56Z",
                    boot_id="b",
                )
            )
            for resource, known, hca in keys
        ],
    )


def test_every_hca_is_offered_by_the_default_pool(shell_of: ShellOf, tmp_path: Path) -> None:
    found = shell_of(servers.dgx(tmp_path))("devices", "-o", "json").document()

    assert tuple(device["hca"]["id"] for device in found) == servers.DGX_HCAS
    for device in found:
        assert device["offered"] == [{"resource": "rdma/hca", "ids": 64, "held": 0, "unfit": {}}]
        assert device["fault"] == ""
        assert device["hca"]["rdma"][0]["uverbs"]["major"] == servers.MAJOR


def test_who_holds_an_hca_is_told_as_far_as_the_kubelet_tells(
    shell_of: ShellOf, tmp_path: Path
) -> None:
    paths = servers.dgx(tmp_path)
    _configured(paths, "pools: [{name: rdma/hca}, {name: rdma/more, overlap: true}]")
    first, second = servers.DGX_HCAS[:2]
    ids = (f"{first}-0", f"{first}-1", f"{second}-0")
    _allocated(
        paths,
        *(("rdma/hca", device_id, device_id[:-2]) for device_id in ids),
        ("rdma/more", f"{first}-7", first),
    )
    entry = {"PodUID": "uid-1", "ContainerName": "main", "ResourceName": "rdma/hca"}
    entries = [{**entry, "DeviceIDs": {"-1": ids[:2]}}]
    paths.device_plugins.mkdir(parents=True)
    content = json.dumps({"Data": {"PodDeviceEntries": entries}})
    (paths.device_plugins / "kubelet_internal_checkpoint").write_text(content)

    found = shell_of(paths)("devices", "-o", "json").document()
    out = shell_of(paths)("devices").out

    unknown, known = (
        {"pod": "", "name": "", "uid": ""},
        {"pod": "uid-1", "name": "main", "uid": "uid-1"},
    )
    other = {"container": unknown, "resource": "rdma/more", "ids": 1}
    held = {"container": known, "resource": "rdma/hca", "ids": 2}
    assert found[0]["held"] == [other, held]
    assert [each["held"] for each in found[0]["offered"]] == [2, 1]
    assert found[2]["held"] == []
    table = out.partition("HELD BY")[2].partition("\n\n")[0].splitlines()[1:]
    assert [line.split() for line in table] == [
        [first, "not", "known", "-", "rdma/more", "1"],
        [first, "uid-1", "main", "rdma/hca", "2"],
        [second, "not", "known", "-", "rdma/hca", "1"],
    ]
    assert "\\n" not in out, "cells of both pools have lines of their own"
    (note,) = (line for line in out.splitlines() if line.startswith("* the holders of devices"))
    assert "pod-resources/kubelet.sock: does not exist" in note


def test_pools_and_the_reasons_of_those_that_do_not_offer_are_told(
    shell_of: ShellOf, tmp_path: Path
) -> None:
    paths = servers.vfs(tmp_path)
    _configured(paths, TWO_POOLS)

    found = shell_of(paths)("devices", "-o", "json").document()

    rows = {device["hca"]["id"]: device for device in found}
    assert rows[servers.VFS[0]]["offered"] == [
        {"resource": "rdma/vf", "ids": 1, "held": 0, "unfit": {}}
    ]
    assert rows[servers.VFS_ETHERNET[0]]["offered"][0]["ids"] == 4
    reasons = {left["resource"]: left["why"] for left in rows[servers.VFS_SF]["not_offered"]}
    assert set(reasons) == {"rdma/vf", "rdma/eth"}
    assert "mlx5_core.sf" in reasons["rdma/eth"]
    assert rows[servers.VFS[2]]["offered"] == []


def test_the_table_has_a_reason_of_each_pool(shell_of: ShellOf, tmp_path: Path) -> None:
    paths = servers.vfs(tmp_path)
    _configured(paths, TWO_POOLS)

    offered, _, left = shell_of(paths)("devices").out.partition("NOT OFFERED")

    rows = [line.split() for line in offered.splitlines()]
    assert [row[0] for row in rows if row[-3:] == ["rdma/vf", "1", "0"]] == [*servers.VFS[:2]]
    assert len([row for row in rows if row[-3:] == ["rdma/eth", "4", "0"]]) == 5
    assert left.count("rdma/vf: PF is ib0#2, not one of ib0#0-1\n") == 1
    assert left.count("rdma/eth: link type is infiniband, not one of ether\n") == 3


def test_a_port_that_is_down_and_an_hca_that_is_gone_are_faults(
    shell_of: ShellOf, tmp_path: Path
) -> None:
    paths = servers.dgx(tmp_path)
    first, second = servers.DGX_HCAS[:2]
    _allocated(paths, ("rdma/hca", f"{first}-0", first), ("rdma/hca", f"{second}-0", second))
    tree = Tree(paths.sys)
    tree.port("mlx5_0", state="1: DOWN", physical_state="3: Disabled")
    tree.remove(second)

    found = shell_of(paths)("devices", "-o", "json").document()

    rows = {device["hca"]["id"]: device for device in found}
    assert "DOWN (Disabled)" in rows[first]["fault"]
    assert rows[first]["offered"], "held, so it stays listed"
    assert not rows[second]["present"]
    assert "gone" in rows[second]["fault"]
    assert "DOWN (Disabled)" in shell_of(paths)("devices").out


def test_why_ids_are_not_handed_out_is_told(shell_of: ShellOf, tmp_path: Path) -> None:
    """An id of the earlier shared pool, another network namespace, a reloaded driver."""
    paths = servers.dgx(tmp_path)
    first, second, third = servers.DGX_HCAS[:3]
    _configured(paths, "pools: [{name: rdma/hca, mode: exclusive}]")
    old = AllocatedRdmaDevice(
        name="mlx5_2",
        uverbs=checkpoint.AllocatedNode("/dev/infiniband/uverbs9", 231, 201),
        ports=(),
    )
    _allocated(paths, ("rdma/hca", f"{first}-3", first), ("rdma/hca", third, third), rdma=(old,))
    (paths.sys / "class/infiniband/mlx5_1").unlink()

    out = shell_of(paths)("devices").out
    found = shell_of(paths)("devices", "-o", "json").document()

    rows = {device["hca"]["id"]: device for device in found}
    reasons = {known: " ".join(rows[known]["offered"][0]["unfit"]) for known in rows}
    assert f"is held by id {first}-3 of an earlier configuration" in reasons[first]
    assert "is in another network namespace" in reasons[second]
    assert "delete the holder's pod" in reasons[third]
    assert all(reasons[known] == "" for known in servers.DGX_HCAS[3:])
    table, _, why = out.partition("UNHEALTHY")
    assert table.count("unhealthy") == 3
    assert [line.split()[:3] for line in why.splitlines() if line.startswith("0000:")] == [
        [known, "rdma/hca", "1"] for known in (first, second, third)
    ]


def test_vf_that_is_set_up_with_its_pod_is_well_while_its_pf_is(
    shell_of: ShellOf, tmp_path: Path
) -> None:
    paths = servers.vfs(tmp_path)
    _configured(paths, TWO_POOLS)
    tree = Tree(paths.sys)
    tree.port("mlx5_2", state="1: DOWN", physical_state="3: Disabled")
    shell = shell_of(paths)

    def vf() -> dict[str, Any]:
        found = shell("devices", "-o", "json").document()
        return next(device for device in found if device["hca"]["id"] == servers.VFS[0])

    assert (vf()["fault"], vf()["offered"][0]["unfit"]) == ("", {})
    tree.port("mlx5_0", state="1: DOWN", physical_state="2: Polling")
    assert f"PF {servers.VFS_PF} is unhealthy: port 1 of mlx5_0 is DOWN" in vf()["fault"]
    assert vf()["offered"][0]["unfit"] == {vf()["fault"]: 1}


def test_an_hca_in_a_pod_is_told_by_its_verbs_device(shell_of: ShellOf, tmp_path: Path) -> None:
    paths = servers.dgx(tmp_path)
    (paths.sys / "class/infiniband/mlx5_0").unlink()

    out = shell_of(paths)("devices").out

    assert "mlx5_0 (in a pod)" in out


@pytest.mark.parametrize(
    ("given", "config", "text"),
    [
        ([], "pools: 3", "config.yaml"),
        (["--config", "/nowhere.yaml"], "", "/nowhere.yaml: this file does not exist"),
    ],
)
def test_what_cannot_be_answered_is_one_line_and_code_1(
    shell_of: ShellOf, tmp_path: Path, given: list[str], config: str, text: str
) -> None:
    paths = servers.dgx(tmp_path)
    _configured(paths, config)

    printed = shell_of(paths)("devices", *given)

    assert printed.code == 1
    assert text in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_another_plugins_file_can_be_tried(shell_of: ShellOf, tmp_path: Path) -> None:
    paths = servers.dgx(tmp_path)
    file = tmp_path / "mellanox.json"
    file.write_text(
        '{"configList": [{"resourceName": "hca_a", "rdmaHcaMax": 5, "selectors": '
        '{"ifNames": ["ib0"]}}]}'
    )

    found = shell_of(paths)("devices", "--config", str(file), "-o", "json").document()

    offered = [device for device in found if device["offered"]]
    assert [device["hca"]["netdevs"] for device in offered] == [["ib0"]]
    assert offered[0]["offered"][0]["ids"] == 5
