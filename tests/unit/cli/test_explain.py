"""`podfabric explain` beside a kubelet and the device plugin, with what the CNI plugins wrote."""

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from base.paths import Paths
from cni.attachments.journal import Journal, JournalEntry, Phase
from deviceplugin.api import v1beta1_pb2
from deviceplugin.kubelet import records
from deviceplugin.kubelet.plugin_server import ServedPool
from deviceplugin.kubelet.registration import PluginServer
from deviceplugin.plugin import DevicePlugin
from deviceplugin.pools.pool_config import DevicePluginConfig, PoolConfig
from gpu.gpu_pool import GpuPoolConfig
from gpu.limits.groups import Groups
from gpu.pools.limit_backend import GpuParts
from ipam.store.sqlite_store import SqliteStore
from node import pods
from node.state import ThisNode
from tests.kubelet import Kubelet
from tests.unit.cli.commands import Shell, short_path
from tests.unit.gpu.driver import Driver
from tests.unit.gpu.groups import PlainRegions
from tests.unit.host import servers
from tests.unit.host.sysfs import Tree
from tests.unit.ipam.calls import reservation

pytestmark = pytest.mark.root

FIRST, SECOND = servers.DGX_HCAS[:2]
CONFIG = DevicePluginConfig(pools=(PoolConfig(resource="rdma/hca", mode="exclusive"),))


class Gpus(ServedPool):
    """NVIDIA's device plugin, as far as the kubelet can tell."""

    def __init__(self) -> None:
        super().__init__("nvidia.com/gpu")
        self.relist([(servers.gpu_uuid(n), True, ()) for n in range(8)])
        self.best = 0  # the number of the GPU that is handed out next

    def preferred(self, available: list[str], must_include: list[str], size: int) -> list[str]:
        return [servers.gpu_uuid(self.best)]

    def allocate(self, ids: list[str]) -> v1beta1_pb2.ContainerAllocateResponse:
        return v1beta1_pb2.ContainerAllocateResponse()


class Fleet(msgspec.Struct, frozen=True):
    """A made-up server with everything running on it."""

    paths: Paths
    kubelet: Kubelet
    shell: Shell
    gpus: Gpus

    def admit(self, name: str, **limits: int) -> None:
        """A pod of namespace "ml" with one container "main"."""
        given = {key.replace("_", "/"): count for key, count in limits.items()}
        wanted = {"nvidia.com/gpu" if key == "gpu" else key: n for key, n in given.items()}
        self.kubelet.admit(name, [{"name": "main", "limits": wanted}], namespace="ml")


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Fleet]:
    with short_path() as directory:
        paths = servers.dgx(directory, nodes=True)
        yield from _running(paths, Shell(paths, monkeypatch, capsys))


def _running(paths: Paths, shell: Shell) -> Iterator[Fleet]:
    _prepared(paths, 'pools: [{name: "rdma/hca", mode: exclusive}]')
    gpus = Gpus()
    plugin, beside = DevicePlugin(paths, CONFIG), PluginServer(paths, gpus)
    with Kubelet(paths.kubelet) as kubelet:
        plugin.start()
        beside.start()
        try:
            kubelet.wait(lambda: kubelet.allocatable("rdma/hca") == 8)
            kubelet.wait(lambda: kubelet.allocatable("nvidia.com/gpu") == 8)
            yield Fleet(paths, kubelet, shell, gpus)
        finally:
            plugin.close()
            beside.close()


@pytest.fixture
def root() -> Iterator[Path]:
    """The server's directory, with a path short enough for a socket."""
    with short_path() as directory:
        yield directory


@pytest.fixture
def shell(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """A server on which nothing runs."""
    paths = servers.dgx(root)
    _prepared(paths, "pools:\n- {name: rdma/hca}\n- {name: rdma/all, mode: all, overlap: true}")
    return Shell(paths, monkeypatch, capsys)


def _prepared(paths: Paths, config: str) -> None:
    (paths.proc / "sys/kernel/random").mkdir(parents=True)
    (paths.proc / "sys/kernel/random/boot_id").write_text("a-boot\n")
    paths.etc.mkdir(exist_ok=True)
    paths.config.write_text(config)


def _attached(paths: Paths, pod: str, ifname: str, **undo: Any) -> None:  # noqa: ANN401
    entry = JournalEntry(
        plugin="ipoib" if "parent" in undo else "sriov",
        network="fabric",
        container_id="0123456789abcdef",
        ifname=ifname,
        netns="/var/run/netns/x",
        netns_identity="cookie:1",
        boot_id="a-boot",
        phase=Phase.ATTACHED,
        pod_namespace="ml",
        pod_name=pod,
        pod_uid=f"uid-of-ml-{pod}",
        since="2026-11-21T19:12:56Z",
        addresses=("10.0.0.7/24",),
        device=undo.get("device", ""),
        undo=msgspec.Raw(msgspec.json.encode(undo)),
    )
    Journal(paths).write(entry)


def test_a_pods_devices_attachment_and_distances_are_one_picture(fleet: Fleet) -> None:
    fleet.admit("worker-0", gpu=1, rdma_hca=1)
    _attached(fleet.paths, "worker-0", "net1", parent="ib0", pkey=0x8001)

    printed = fleet.shell("explain", "ml/worker-0", "-o", "json")

    found = printed.document()
    assert printed.code == 0
    devices = {device["resource"]: device for device in found["devices"]}
    hca = devices["rdma/hca"]
    assert found["pod"]["uid"] == "uid-of-ml-worker-0"
    assert (hca["container"], hca["id"], hca["netdevs"]) == ("main", FIRST, ["ib0"])
    assert hca["verbs"] == [{"rdma": "mlx5_0", "uverbs": "uverbs0", "major": 231, "minor": 192}]
    assert devices["nvidia.com/gpu"]["gpu"] == f"GPU0 {servers.DGX_GPUS[0]}"
    (attachment,) = found["attachments"]
    assert attachment["hca"] == FIRST
    assert attachment["pkey"] == "0x8001"
    assert attachment["addresses"] == ["10.0.0.7/24"]
    assert attachment["matches"] is True
    assert found["ways"][0]["distance"] == "PIX"
    assert found["ways"][0]["gpudirect"] is True
    assert found["notes"] == []


def test_what_a_pod_has_of_a_gpu_is_shown_with_the_cost_of_the_way_to_its_hca(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with short_path() as directory:
        paths = servers.dgx(directory, nodes=True)
        Driver(paths).nodes(range(8))
        shell = Shell(paths, monkeypatch, capsys)
        _prepared(paths, 'pools: [{name: "rdma/hca", mode: exclusive}]')
        units = GpuPoolConfig(mode="units", memory=8 << 30, reserve=0)
        config = DevicePluginConfig(pools=CONFIG.pools, gpus=(units,))
        groups = Groups(paths.run / "gpu", regions=PlainRegions())
        parts = GpuParts(groups=groups, obstacle=lambda: None)
        plugin = DevicePlugin(paths, config, gpu_parts=parts)
        with Kubelet(paths.kubelet) as kubelet:
            plugin.start()
            try:
                kubelet.wait(lambda: kubelet.allocatable(units.compute_resource) == 800)
                kubelet.wait(lambda: kubelet.allocatable(units.memory_resource) == 64)
                kubelet.wait(lambda: kubelet.allocatable("rdma/hca") == 8)
                limits = {"rdma/hca": 1, units.memory_resource: 2, units.compute_resource: 50}
                kubelet.admit("trainer", [{"name": "main", "limits": limits}], namespace="ml")
                found = shell("explain", "ml/trainer", "-o", "json").document()
                text = shell("explain", "ml/trainer").out
            finally:
                plugin.close()
    assert [device["resource"] for device in found["devices"]] == ["rdma/hca"]
    (part,) = found["gpus"]
    assert part["gpu"] == servers.DGX_GPUS[0]
    assert set(part["resources"]) == {units.memory_resource, units.compute_resource}
    assert (len(part["ids"]), part["memory_bytes"], part["compute_share"]) == (52, 2 << 30, 0.5)
    (way,) = found["ways"]
    assert (way["distance"], way["cost"]) == ("PIX", 0)
    assert found["notes"] == []
    assert "PIX, cost 0" in text
    (row,) = (line.split() for line in text.splitlines() if line.endswith("50%"))
    assert row[:2] == ["main", "GPU0"]
    assert " ".join(row[3:6]) == "52 2 GiB"


def test_an_interface_on_another_hca_is_a_mismatch_that_names_both(fleet: Fleet) -> None:
    fleet.admit("worker-0", rdma_hca=1)
    _attached(fleet.paths, "worker-0", "net1", device=SECOND)

    printed = fleet.shell("explain", "ml/worker-0")

    assert "NO: " in printed.out
    assert f"{SECOND} (mlx5_1), but the pod has {FIRST} (mlx5_0)" in printed.out


def test_the_output_is_the_kept_one(fleet: Fleet) -> None:
    fleet.admit("worker-0", gpu=1, rdma_hca=2)
    _attached(fleet.paths, "worker-0", "net1", parent="ib0", pkey=0x8001)
    _attached(fleet.paths, "worker-0", "net2", parent="ib3", pkey=0x8001)
    fleet.shell.as_kept("podfabric explain ml/worker-0")
    by_option = fleet.shell("explain", "worker-0", "-n", "ml").out
    assert by_option == fleet.shell("explain", "ml/worker-0").out


def test_a_gpu_beyond_pxb_is_told_in_a_sentence(fleet: Fleet) -> None:
    fleet.admit("other", rdma_hca=7)
    (other,) = fleet.kubelet.held()
    (left,) = {*servers.DGX_HCAS} - {*other.devices}
    fleet.gpus.best = 7 if left in servers.DGX_HCAS[:4] else 0  # at the other socket
    gpu = servers.DGX_GPUS[fleet.gpus.best]
    fleet.admit("both", gpu=1, rdma_hca=1)

    found = fleet.shell("explain", "ml/both", "-o", "json").document()

    (way,) = found["ways"]
    assert way["gpu"].endswith(gpu)
    assert way["gpudirect"] is False
    (note,) = found["notes"]
    assert "GPUDirect RDMA will not work" in note
    assert "the nearest is mlx5_" in note
    assert "at SYS" in note


def test_device_numbers_that_changed_since_are_told(fleet: Fleet) -> None:
    fleet.admit("worker-0", rdma_hca=1)
    tree = Tree(fleet.paths.sys, fleet.paths)
    directory = tree.device(FIRST) / "infiniband_verbs/uverbs0"
    (directory / "dev").write_text("231:250\n")

    found = fleet.shell("explain", "ml/worker-0", "-o", "json").document()

    assert any("the driver was loaded again" in note for note in found["notes"])


def test_a_pod_that_nobody_knows_is_an_error(fleet: Fleet) -> None:
    printed = fleet.shell("explain", "ml/none")

    assert (printed.code, printed.out) == (1, "")
    assert "podfabric knows no pod ml/none on this node: " in printed.err
    assert "and the kubelet gave it no device: " in printed.err


@pytest.mark.parametrize("form", ["table", "json"])
def test_a_pod_that_nobody_knows_is_an_error_without_a_kubelet_too(shell: Shell, form: str) -> None:
    printed = shell("explain", "ml/none", "-o", form)

    assert (printed.code, printed.out) == (1, "")
    assert "podfabric knows no pod ml/none on this node: " in printed.err
    assert "and the kubelet could not be asked: " in printed.err
    assert "pod-resources/kubelet.sock: does not exist" in printed.err


def test_addresses_on_interfaces_of_other_plugins_are_shown(shell: Shell, root: Path) -> None:
    """As macvlan with `podfabric-ipam`, which the journal does not have."""
    paths = Paths.from_environ(os.environ)
    _attached(paths, "worker-0", "net1", parent="ib3", pkey=0x8001)
    (entry,) = (each for each in Journal(paths).entries() if isinstance(each, JournalEntry))
    ours = {"network": entry.network, "container_id": entry.container_id, "ifname": "net1"}
    others = {"network": "storage", "container_id": entry.container_id, "ifname": "net2"}
    SqliteStore(paths.ipam, "a-boot").load(
        [
            reservation("10.0.0.7", namespace="ml", pod="worker-0", **ours),
            reservation("10.5.0.8", namespace="ml", pod="worker-0", **others),
            reservation("10.5.0.9", namespace="ml", pod="worker-1", **others),
        ]
    )

    found = shell("explain", "ml/worker-0", "-o", "json").document()
    text = shell("explain", "ml/worker-1").out

    assert [(each["ifname"], each["address"]) for each in found["beside"]] == [("net2", "10.5.0.8")]
    assert "podfabric made no interface of it on this node" in text
    assert text.splitlines()[-1].split()[:3] == ["*", "the", "kubelet"]
    (row,) = (line for line in text.splitlines() if line.startswith("net2"))
    assert row.split() == ["net2", "storage", "10.5.0.9", "10.0.0.0/8"]


def test_what_could_not_be_asked_is_said(shell: Shell, root: Path) -> None:
    paths = Paths.from_environ({"PODFABRIC_STATE": str(root / "state")})
    _attached(paths, "worker-0", "net1", parent="ib3", pkey=0x8001)

    printed = shell("explain", "ml/worker-0", "-o", "json")

    found = printed.document()
    assert printed.code == 0
    assert found["answered"] is False
    assert any("pod-resources/kubelet.sock: does not exist" in note for note in found["notes"])
    assert found["attachments"][0]["rdma"] == "mlx5_3"
    assert found["attachments"][0]["matches"] is None
    assert "unknown" in shell("explain", "ml/worker-0").out


def test_a_damaged_journal_file_is_a_note(fleet: Fleet) -> None:
    fleet.admit("worker-0", rdma_hca=1)
    fleet.paths.attachments.mkdir(parents=True)
    (fleet.paths.attachments / "x-net1-y.json").write_text("{")

    found = fleet.shell("explain", "ml/worker-0", "-o", "json").document()

    assert any("x-net1-y.json" in note for note in found["notes"])
    assert found["devices"]


@pytest.mark.parametrize(
    "given",
    [[], ["ns/a", "-n", "other"]],
)
def test_a_wrong_command_line_ends_with_2(shell: Shell, given: list[str]) -> None:
    assert shell("explain", *given).code == 2


def test_who_may_not_read_the_files_is_told_so(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(node: ThisNode, *of: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(node.paths.devices))

    monkeypatch.setattr(pods, "explained", forbidden)

    printed = shell("explain", "ml/worker-0")

    assert (printed.code, printed.out) == (1, "")
    assert printed.err.endswith("/devices: Permission denied: run it as root\n")


def test_no_wait_for_a_silent_kubelet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with short_path() as root, socket.socket(socket.AF_UNIX) as silent:
        paths = servers.dgx(root)
        paths.pod_resources.parent.mkdir(parents=True)
        silent.bind(str(paths.pod_resources))
        silent.listen()
        monkeypatch.setattr(records, "KUBELET_TIMEOUT", 0.2)

        printed = Shell(paths, monkeypatch, capsys)("explain", "ml/worker-0")

    assert printed.code == 1
    assert "DEADLINE_EXCEEDED" in printed.err
