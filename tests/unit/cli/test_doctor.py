"""`podfabric doctor` on made-up servers: each thing that can be wrong is seen, and nothing else."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from base.paths import Paths
from base.types import DeviceId
from cli import doctor
from cli.checks import Finding, Outcome, kernel, ok
from cli.setup.executables import PLUGINS, place_kept
from deviceplugin import checkpoint
from deviceplugin.allocate.memlock import HOOK
from deviceplugin.checkpoint import AllocatedHCA, Allocation
from deviceplugin.plugin import DevicePlugin
from deviceplugin.pools.pool_config import DevicePluginConfig, PoolConfig
from host.errors import HostError
from node.state import ThisNode
from tests.kubelet import Kubelet
from tests.unit.cli.commands import Shell, short_path
from tests.unit.host import servers
from tests.unit.host.sysfs import Tree

pytestmark = pytest.mark.root

FIRST, SECOND = servers.DGX_HCAS[:2]
UID = "1538af01-9c17-4d80-be64-4c8d34a042ea"
UNLIMITED = "unlimited            unlimited"
EIGHT_MIB = "8388608              8388608 "


@pytest.fixture(autouse=True)
def shared_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed answer of the kernel, independent of this machine."""
    monkeypatch.setattr(kernel, "rdma_mode", lambda: "shared")


@pytest.fixture
def node() -> Iterator[Paths]:
    """A server on which all is well, but that no agent and no kubelet runs."""
    with short_path() as directory:
        paths = servers.dgx(directory, nodes=True)
        (paths.proc / "sys/kernel/random").mkdir(parents=True)
        (paths.proc / "sys/kernel/random/boot_id").write_text("a-boot\n")
        _process(paths, 100, "containerd", UNLIMITED)
        for number in range(8):
            _net(paths, f"ib{number}", up=True)
        (paths.sys / "module/nvidia_peermem").mkdir(parents=True)
        paths.cni_conf.mkdir()
        (paths.cni_conf / "00-multus.conf").write_text('{"type": "multus"}')
        (paths.cni_conf / "10-calico.conflist").write_text('{"plugins": [{"type": "calico"}]}')
        paths.cni_bin.mkdir()
        (paths.cni_bin / "multus").write_text("")
        for name in PLUGINS:
            (paths.cni_bin / name).write_bytes(b"\x7fELFpodfabric launcher 1")
        yield paths


def _process(paths: Paths, pid: int, name: str, limit: str) -> None:
    directory = paths.proc / str(pid)
    directory.mkdir(exist_ok=True)
    (directory / "comm").write_text(f"{name}\n")
    (directory / "limits").write_text(
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max open files            1048576              1048576              files     \n"
        f"Max locked memory         {limit}            bytes     \n"
    )


def _container(paths: Paths, pid: int, limit: str, variable: str, *, id_: str = "c") -> None:
    """A process of a container of pod UID. Processes with higher pids started later."""
    _process(paths, pid, "python3", limit)
    directory = paths.proc / str(pid)
    (directory / "cgroup").write_text(f"0::/kubepods/pod{UID}/{id_ * 64}\n")
    (directory / "stat").write_text(f"{pid} (a) b) S {' 0' * 18} {pid} 0\n")
    (directory / "environ").write_bytes(f"PATH=/bin\0{variable}=\xff\0".encode("latin-1"))


def _hook(paths: Paths) -> None:
    assert paths.host_cni_bin is not None
    hook = paths.proc / f"1/root{paths.host_cni_bin}" / HOOK
    hook.parent.mkdir(parents=True)
    hook.touch(0o755)


def _net(paths: Paths, name: str, *, up: bool) -> None:
    Tree(paths.sys).write(f"class/net/{name}/flags", "0x1003" if up else "0x1002")


def _configured(paths: Paths, text: str) -> None:
    paths.etc.mkdir(exist_ok=True)
    paths.config.write_text(text)


def _found(paths: Paths, check: str) -> list[Finding]:
    checks = [each_check for each_check in doctor.CHECKS if each_check[0] == check]
    assert checks
    return doctor.examine(ThisNode(paths, tolerant=True), checks)


@contextmanager
def _listening(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        yield


def test_a_node_on_which_everything_runs_has_no_failure(
    node: Paths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = Shell(node, monkeypatch, capsys)
    config = DevicePluginConfig(pools=(PoolConfig(resource="rdma/hca", slots=4),))
    _configured(node, "pools: [{name: rdma/hca, slots: 4}]")
    with Kubelet(node.kubelet) as kubelet, _listening(node.agent_socket):
        plugin = DevicePlugin(node, config)
        plugin.start()
        try:
            kubelet.wait(lambda: kubelet.allocatable("rdma/hca") == 32)
            kubelet.admit("pod", [{"name": "main", "limits": {"rdma/hca": 1}}])

            printed, text = shell("doctor", "-o", "json"), shell("doctor")
            Tree(node.sys).port("mlx5_0", state="1: DOWN", physical_state="2: Polling")
            _net(node, "ib2", up=False)
            _process(node, 100, "containerd", EIGHT_MIB)
            _hook(node)
            shell.as_kept("podfabric doctor")
        finally:
            plugin.close()

    found = msgspec.convert(printed.document(), list[Finding])
    assert [finding for finding in found if finding.status in ("failed", "warning")] == []
    assert (printed.code, text.code) == (0, 0)
    assert {finding.check for finding in found} == {name for name, _ in doctor.CHECKS}
    seen = {finding.check: finding.seen for finding in found}
    assert "agree on 1 allocations" in seen["checkpoint"]
    assert "1 pods hold devices" in seen["PodResources"]
    assert "32 of our 32 ids" in seen["resources"]
    assert "0 failed, 0 warnings" in text.out


def test_a_node_without_kubelet_and_agent_fails_and_says_what_to_do(
    node: Paths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = Shell(node, monkeypatch, capsys)("doctor")

    assert printed.code == 1
    assert f"{node.agent_socket}: it does not exist" in printed.out
    assert "log of podfabric's pod of this node; without Kubernetes: `systemctl" in printed.out
    assert "PODFABRIC_KUBELET" in printed.out


def _port(
    state: str = "4: ACTIVE", physical_state: str = "5: LinkUp", rate: str = "400 Gb/sec (4X NDR)"
) -> Callable[[Paths], None]:
    def change(paths: Paths) -> None:
        tree = Tree(paths.sys)
        guid = servers.port_guid(0)
        tree.port("mlx5_0", guid=guid, state=state, physical_state=physical_state, rate=rate)

    return change


def _gone(path: str) -> Callable[[Paths], None]:
    def remove(paths: Paths) -> None:
        found = paths.sys.parent / path
        if found.is_dir() and not found.is_symlink():
            found.rename(found.with_name(f".{found.name}"))
        else:
            found.unlink()

    return remove


def _config(text: str) -> Callable[[Paths], None]:
    return lambda paths: _configured(paths, text)


def _file(path: str, text: str) -> Callable[[Paths], None]:
    def write(paths: Paths) -> None:
        found = paths.sys.parent / path
        found.parent.mkdir(parents=True, exist_ok=True)
        found.write_text(text)

    return write


def _returned(name: str) -> Callable[[Paths], None]:
    def write(paths: Paths) -> None:
        for path in (paths.cni_bin / name, place_kept(paths.cni_bin / name)):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("#!/bin/sh")

    return write


_BY_HAND = 'pools: [{name: rdma/hca, selectors: [{rdmaDevices: ["mlx5_0"]}]}]'


@pytest.mark.parametrize(
    ("check", "change", "status", "words"),
    [
        ("configuration", _config("pools: 3"), "failed", "config.yaml"),
        ("configuration", _config("agent: {workers: 0}"), "failed", "workers"),
        ("configuration", _config("agent: {workers: 2}"), "ok", "rdma/hca (shared)"),
        ("pools", _config('pools: [{name: rdma/a, selectors: [{vendors: ["8086"]}]}]'), "failed",
         "rdma/a offers nothing: vendor is 15b3"),
        ("pools", _config("pools: []"), "not applicable", "no pool"),
        ("pools", _gone("sys/class/infiniband_verbs"), "failed", "512 unhealthy: mlx5_0 has no"),
        ("module rdma_ucm", _gone("sys/class/misc/rdma_cm"), "warning", "rdma_ucm"),
        ("module ib_umad", _config("pools: [{name: rdma/hca, nodes: [umad]}]"), "ok", "ib_umad"),
        ("device nodes", _gone("dev/infiniband/uverbs3"), "failed", "uverbs3"),
        ("locked memory", lambda paths: _process(paths, 100, "containerd", EIGHT_MIB), "warning",
         "containerd: 8 MiB"),
        ("locked memory", lambda paths: _process(paths, 101, "kubelet", EIGHT_MIB), "ok",
         "containerd: unlimited"),
        ("locked memory", _gone("proc/100"), "not applicable", "containerd"),
        ("ports", _port(state="1: DOWN", physical_state="2: Polling"), "warning",
         "port 1 of mlx5_0 (0000:1c:00.0) is DOWN (Polling)"),
        ("ports", _port(rate="100 Gb/sec (1X NDR)"), "warning", "1 of 4 lanes"),
        ("ports", _port(state="2: INIT"), "warning", "port 1 of mlx5_0 (0000:1c:00.0) is INIT"),
        ("IPoIB parents", lambda paths: _net(paths, "ib2", up=False), "failed", "down: ib2"),
        ("GPU memory", _gone("sys/module/nvidia_peermem"), "warning", "dma-buf"),
        ("Multus", _gone("cni_conf"), "failed", "no CNI configuration"),
        ("Multus", _gone("cni_conf/00-multus.conf"), "warning", "10-calico.conflist"),
        ("Multus", _file("cni_conf/00-a.conf", '{"type": "bridge"}'), "failed", "00-a.conf"),
        ("Multus", _gone("cni_bin/multus"), "failed", "executable"),
        ("CNI executables", _gone("cni_bin/ipoib"), "failed", "lacks ipoib"),
        ("CNI executables", _file("cni_bin/sriov", "#!/bin/sh"), "warning", "sriov"),
        ("CNI executables", _returned("sriov"), "failed", "sriov: another project's file took"),
        ("CNI executables", _returned("nv-ipam"), "failed", "nv-ipam: another project's file"),
        ("PodResources", _file("kubelet/none", ""), "failed", "kubelet.sock: does not exist"),
    ],
)  # fmt: skip
def test_each_fault_is_found(
    node: Paths, check: str, change: Callable[[Paths], None], status: str, words: str
) -> None:
    change(node)

    found = [finding for finding in _found(node, check) if finding.status == status]

    assert found, _found(node, check)
    assert words in " ".join(finding.seen for finding in found)
    assert status not in ("failed", "warning") or all(finding.remedy for finding in found)


def test_containers_whose_limit_was_not_raised_are_named(node: Paths) -> None:
    _configured(node, "pools: [{name: rdma/hca, memlock: 64Mi}]")
    _hook(node)
    _process(node, 100, "containerd", EIGHT_MIB)
    _container(node, 200, "67108864             67108864 ", "PCIDEVICE_RDMA_HCA")
    _container(node, 201, EIGHT_MIB, "PCIDEVICE_RDMA_HCA")  # of `kubectl exec`
    _container(node, 202, EIGHT_MIB, "PCIDEVICE_RDMA_OTHER", id_="d")
    (node.proc / "203").mkdir()  # a process that ends meanwhile
    (found,) = _found(node, "locked memory")
    assert (found.status, "with HCAs: 67108864" in found.seen) == ("ok", True), found

    _container(node, 199, EIGHT_MIB, "PCIDEVICE_RDMA_HCA", id_="e")
    with Kubelet(node.kubelet):
        _kubelets(node, {"rdma/hca": [f"{FIRST}-0"]}, {})
        (found,) = _found(node, "locked memory")
    assert found.status == "warning"
    assert found.seen.endswith(f": {UID} ({'e' * 12}: 8388608 bytes, not 67108864)")
    assert "delete the pods" in found.remedy

    _configured(node, "pools: [{name: rdma/hca, memlock: false}]")
    (found,) = _found(node, "locked memory")
    assert "No hook raises this limit: no pool sets a limit" in found.seen


def test_a_port_that_a_pool_offers_by_name_fails_when_it_is_down(node: Paths) -> None:
    _configured(node, _BY_HAND)
    for name in ("mlx5_0", "mlx5_1"):
        Tree(node.sys).port(name, state="1: DOWN", physical_state="3: Disabled")

    found = {
        finding.seen[:17]: finding.status
        for finding in _found(node, "ports")
        if "DOWN" in finding.seen
    }

    assert found == {"port 1 of mlx5_0 ": "failed", "port 1 of mlx5_1 ": "warning"}


@pytest.mark.parametrize(
    ("mode", "pool", "status"),
    [
        ("shared", "shared", "ok"),
        ("exclusive", "shared", "failed"),
        ("exclusive", "all", "failed"),
        ("exclusive", "exclusive", "ok"),
    ],
)
def test_the_rdma_mode_is_held_against_the_pools(
    node: Paths, monkeypatch: pytest.MonkeyPatch, mode: str, pool: str, status: str
) -> None:
    monkeypatch.setattr(kernel, "rdma_mode", lambda: mode)
    _configured(node, f"pools: [{{name: rdma/hca, mode: {pool}}}]")

    (found,) = _found(node, "RDMA namespaces")

    assert found.status == status
    assert found.seen.startswith(f"{mode}: ")
    assert "rdmaIsolation" in found.seen + found.remedy


def test_an_rdma_mode_that_is_not_known_is_a_warning(
    node: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> str:
        raise HostError("no RDMA netlink")

    monkeypatch.setattr(kernel, "rdma_mode", broken)

    (found,) = _found(node, "RDMA namespaces")

    assert (found.status, "no RDMA netlink" in found.seen) == ("warning", True)


def test_gpus_beyond_pxb_of_every_hca_are_a_warning(tmp_path: Path) -> None:
    paths = servers.flat_vm(tmp_path)

    (found,) = _found(paths, "GPUs and HCAs")

    assert found.status == "warning"
    assert "GPU0, GPU1, GPU2, GPU3: the nearest HCA is at PHB" in found.seen


def test_ids_that_cannot_be_handed_out_are_a_warning_with_the_reason(node: Paths) -> None:
    _configured(node, "pools: [{name: rdma/hca, slots: 4}]")
    (node.sys / "class/infiniband/mlx5_0").unlink()

    (found,) = _found(node, "pools")

    assert found.status == "warning"
    assert f"4 unhealthy: the RDMA device of {FIRST} is in another network namespace" in found.seen
    assert "`podfabric devices`" in found.remedy


def test_vfs_that_are_set_up_with_their_pods_are_no_failure(tmp_path: Path) -> None:
    paths = servers.vfs(tmp_path)
    _configured(
        paths,
        "pools: [{name: rdma/vf, mode: exclusive, selectors: {pfNames: [ib0, enp59s0f1np0]}}]",
    )
    for number in range(2, 11):
        Tree(paths.sys).port(f"mlx5_{number}", state="1: DOWN", physical_state="3: Disabled")
    for number in range(2, 6):
        _net(paths, f"ib{number}", up=False)
    _net(paths, "ib0", up=True)

    for check in ("ports", "pools", "IPoIB parents"):
        assert [finding.status for finding in _found(paths, check)] == ["ok"], check
    assert "9 become active with the pods" in _found(paths, "ports")[0].seen

    Tree(paths.sys).port("mlx5_0", state="1: DOWN", physical_state="2: Polling")
    (found,) = _found(paths, "pools")
    assert (found.status, "4 unhealthy: its PF 0000:3b:00.0" in found.seen) == ("warning", True)


def test_what_another_pools_pods_hold_is_no_warning(node: Paths) -> None:
    _configured(
        node,
        "pools: [{name: rdma/hca, mode: exclusive}, "
        "{name: rdma/one, mode: exclusive, overlap: true}]",
    )
    _allocated(node, FIRST, "2026-01-01T00:00:00Z")

    assert [finding.status for finding in _found(node, "pools")] == ["ok", "ok"]


def _allocated(paths: Paths, known: str, time: str) -> None:
    device = AllocatedHCA(id=FIRST, address=FIRST, netdevs=(), rdma=())
    allocation = Allocation(
        resource="rdma/hca", id=DeviceId(known), devices=(device,), time=time, boot_id="a-boot"
    )
    checkpoint.write(paths, [checkpoint.encode(allocation)], {"rdma/hca": []})


@pytest.mark.parametrize(
    ("id_", "time", "statuses", "words"),
    [
        (f"{FIRST}-0", "2026-01-01T00:00:00Z", ["ok"], "agree on 1"),
        (f"{FIRST}-1", "2026-01-01T00:00:00Z", ["failed", "warning"], f"rdma/hca {FIRST}-1"),
        (f"{FIRST}-1", "2999-01-01T00:00:00Z", ["failed"], f"rdma/hca {FIRST}-0"),
    ],
)
def test_the_checkpoint_is_held_against_the_kubelets(
    node: Paths, id_: str, time: str, statuses: list[str], words: str
) -> None:
    _allocated(node, id_, time)
    with Kubelet(node.kubelet):
        _kubelets(node, {"rdma/hca": [f"{FIRST}-0"]}, {})

        found = _found(node, "checkpoint")

    assert [finding.status for finding in found] == statuses
    assert words in " ".join(finding.seen for finding in found)


def _kubelets(paths: Paths, held: dict[str, list[str]], registered: dict[str, list[str]]) -> None:
    """The kubelet's own checkpoint."""
    entries: list[dict[str, Any]] = [
        {"PodUID": UID, "ContainerName": "main", "ResourceName": name, "DeviceIDs": {"-1": ids}}
        for name, ids in held.items()
    ]
    data = {"PodDeviceEntries": entries, "RegisteredDevices": registered}
    paths.device_plugins.mkdir(parents=True, exist_ok=True)
    file = paths.device_plugins / "kubelet_internal_checkpoint"
    file.write_bytes(msgspec.json.encode({"Data": data, "Checksum": 0}))


@pytest.mark.parametrize(
    ("registered", "status", "words"),
    [
        ({"rdma/hca": [f"{FIRST}-0"]}, "ok", "1 of our 512 ids"),
        ({"rdma/hca": ["mlx5_0", f"{FIRST}-0"]}, "failed", "not podfabric's: mlx5_0"),
        ({"nvidia.com/gpu": ["GPU-0"]}, "failed", "does not have it"),
        ({}, "not applicable", "no resource"),
    ],
)
def test_another_plugin_by_our_name_is_seen_in_the_kubelets_checkpoint(
    node: Paths, registered: dict[str, list[str]], status: str, words: str
) -> None:
    _kubelets(node, {}, registered)

    (found,) = _found(node, "resources")

    assert (found.status, words in found.seen) == (status, True), found


def test_a_damaged_checkpoint_fails_that_check_and_no_other(node: Paths) -> None:
    node.devices.mkdir(parents=True)
    node.checkpoint.write_text("{")

    (found,) = _found(node, "checkpoint")

    assert found.status == "failed"
    assert str(node.checkpoint) in found.seen
    assert [finding.status for finding in _found(node, "ports")] == ["ok"]


def test_a_check_that_breaks_off_is_a_finding_and_the_others_go_on(node: Paths) -> None:
    def broken(_: ThisNode) -> Iterator[Outcome]:
        yield ok("so far")
        raise RuntimeError("a bug")

    def sound(_: ThisNode) -> Iterator[Outcome]:
        yield ok("well")

    found = doctor.examine(ThisNode(node), [("broken", broken), ("sound", sound)])

    assert [(finding.check, finding.status) for finding in found] == [
        ("broken", "ok"),
        ("broken", "failed"),
        ("sound", "ok"),
    ]
    assert "a bug" in found[1].seen


def test_an_empty_machine_is_examined_without_a_single_break(tmp_path: Path) -> None:
    paths = Paths(**{name: tmp_path / name for name in Paths.__struct_fields__})

    found = doctor.examine(ThisNode(paths, tolerant=True))

    assert not [finding for finding in found if "the check failed" in finding.seen]
    assert {finding.check for finding in found} == {name for name, _ in doctor.CHECKS}
