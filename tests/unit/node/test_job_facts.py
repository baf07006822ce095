"""Facts of a FabricNode for `podfabric explain --job`: distances, GIDs, locked memory."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent import node_report
from agent.node_report import NodeReport
from base.paths import Paths
from deviceplugin.allocate.memlock import HOOK
from node import fabric_node, observation, usage
from node.fabric_node import FabricNodeStatus
from node.page import html_page
from node.state import ThisNode
from node.usage import LockedMemory
from tests.unit.cli.commands import Shell, short_path
from tests.unit.host import servers
from tests.unit.host.sysfs import Tree
from tests.unit.node.test_fabric_node import FIRST, NODE, hold

UID = "0e3f5a64-9d1c-4a53-9d6f-2f6c2b8a7c11"
VARIABLE = "PCIDEVICE_RDMA_HCA"
LIMIT = "Max locked memory         {0}            {0}            bytes     \n"
WARNING = "containers keep the runtime's limit of locked memory: the host has no executable "


@pytest.fixture
def paths() -> Iterator[Paths]:
    with short_path() as root:
        made = servers.dgx(root)
        made.config.parent.mkdir(parents=True, exist_ok=True)
        made.config.write_text('pools: [{name: "rdma/hca", mode: exclusive}]')
        yield made


@pytest.fixture
def shell(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    return Shell(paths, monkeypatch, capsys)


def seen(paths: Paths) -> FabricNodeStatus:
    return observation.observed(ThisNode(paths, tolerant=True), {}, "1.2.3")


def locked(paths: Paths, before: usage.Usage = usage.NO_USAGE) -> tuple[LockedMemory, ...]:
    return usage.measured(ThisNode(paths, tolerant=True), before).locked_memory


def process(paths: Paths, pid: int, limit: str, *, uid: str = UID, container: str = "c") -> Path:
    """A process of a container with an HCA. Processes with higher pids started later."""
    directory = paths.proc / str(pid)
    directory.mkdir(parents=True)
    (directory / "cgroup").write_text(f"0::/kubepods/pod{uid}/{container * 64}\n")
    (directory / "stat").write_text(f"{pid} (a) b) S {' 0' * 18} {pid} 0\n")
    (directory / "environ").write_bytes(f"PATH=/bin\0{VARIABLE}=x\0".encode())
    (directory / "limits").write_text(LIMIT.format(limit))
    return directory


def install_hook(paths: Paths) -> None:
    hook = paths.proc / f"1/root{paths.host_cni_bin}/{HOOK}"
    hook.parent.mkdir(parents=True)
    hook.touch(0o755)


def test_a_gpu_has_its_distances_and_the_pods_of_another_device_plugin(paths: Paths) -> None:
    hold(paths, FIRST, UID)
    file = paths.device_plugins / "kubelet_internal_checkpoint"
    document = json.loads(file.read_text())
    document["Data"]["PodDeviceEntries"].append(
        {"PodUID": UID, "ContainerName": "main", "ResourceName": "nvidia.com/gpu",
         "DeviceIDs": {"0": [servers.gpu_uuid(1)]}}
    )  # fmt: skip
    file.write_text(json.dumps(document))
    gpus = seen(paths).gpus
    assert [gpu.pods for gpu in gpus[:3]] == [(), (UID,), ()]
    assert gpus[1].distances[:3] == ("PIX mlx5_0", "PIX mlx5_1", "NODE mlx5_2")
    assert gpus[1].distances[-1] == "SYS mlx5_7"


def test_a_port_has_its_subnet_or_its_kinds_of_gids(paths: Paths) -> None:
    tree = Tree(paths.sys, paths)
    port = tree.port("mlx5_1", link_layer="Ethernet", netdev="eth1")
    found = [hca.ports[0] for hca in seen(paths).hcas[:2]]
    assert [(one.subnet, one.gids) for one in found] == [("fe80:0000:0000:0000", ()), ("", ())]
    mapped = "0000:0000:0000:0000:0000:ffff:0a38:0001"
    entries = [
        ("fe80:0000:0000:0000:0002:c9ff:fe03:0001", "IB/RoCE v1", ()),
        ("fe80:0000:0000:0000:0002:c9ff:fe03:0001", "RoCE v2", ("link-local",)),
        (mapped, "IB/RoCE v1", ("link-local",)),
        (mapped, "RoCE v2", ("IPv4",)),
        ("fd00:0000:0000:0000:0000:0000:0000:0001", "RoCE v2", ("IPv4", "IPv6")),
    ]
    for index, (gid, kind, kinds) in enumerate(entries):
        for name, text in (("gid_attrs/ndevs", "eth1"), ("gids", gid), ("gid_attrs/types", kind)):
            (port / name).mkdir(exist_ok=True)
            (port / name / str(index)).write_text(f"{text}\n")
        (found_port,) = seen(paths).hcas[1].ports
        assert found_port.gids == tuple(f"RoCE v2 {each}" for each in kinds)


def test_a_pod_has_the_lowest_limit_of_its_containers(paths: Paths) -> None:
    process(paths, 300, "unlimited")
    assert locked(paths) == ()  # no pod holds an HCA
    hold(paths, FIRST, UID)
    assert locked(paths) == (LockedMemory(pod=UID, limit="unlimited"),)
    process(paths, 301, "65536")  # of `kubectl exec`
    other = "1" * 8 + UID[8:]
    process(paths, 299, "65536", uid=other, container="d")  # of a pod without an HCA
    (process(paths, 298, "65536", container="e") / "environ").write_bytes(b"PATH=/bin\0")
    (paths.proc / "297").mkdir()  # ends meanwhile
    assert locked(paths) == (LockedMemory(pod=UID, limit="unlimited"),)
    gone = process(paths, 302, "65536", container="f")
    low = (LockedMemory(pod=UID, limit="65536", wanted="unlimited"),)
    assert locked(paths) == low
    for name in ("limits", "environ", "stat", "cgroup"):  # the container ends
        (gone / name).unlink()
        assert locked(paths) == (LockedMemory(pod=UID, limit="unlimited"),)
    assert locked(paths, usage.Usage(locked_memory=low)) == low  # not read again
    paths.config.write_text('pools: [{name: "rdma/hca", mode: exclusive, memlock: false}]')
    assert locked(paths) == ()


def test_locked_memory_is_left_out_before_attachments() -> None:
    rows = tuple(LockedMemory(pod=f"ml/{'p' * 200}{n}", limit="unlimited") for n in range(256))
    status = fabric_node.fitted(FabricNodeStatus(locked_memory=rows))
    assert 0 < len(status.locked_memory) < 256
    assert status.left_out.endswith("of 256 locked memory")


def test_a_missing_hook_is_an_event_and_no_fault(paths: Paths, shell: Shell) -> None:
    told: list[tuple[str, str]] = []
    tell: Callable[[str, str], object] = lambda reason, text: told.append((reason, text))  # noqa: E731
    writer = NodeReport(paths, dict, print, {"NODE_NAME": NODE}, tell_node=tell)
    writer.step()
    hold(paths, FIRST, UID)  # another look
    writer.step()
    ((reason, text),) = told
    assert (reason, text.startswith(WARNING)) == (node_report.WARNING, True)
    ((_, status),) = writer.feed.nodes()
    assert (status.warnings, status.faults, status.counts.faults) == ((text,), (), 0)
    assert text in html_page.document([(NODE, status)]).decode()
    assert f"\nwarning: {text}\n" in shell("status").out
    install_hook(paths)
    assert seen(paths).warnings == ()
    assert "warning" not in shell("status").out
    (paths.proc / f"1/root{paths.host_cni_bin}/{HOOK}").unlink()
    paths.config.write_text('pools: [{name: "rdma/hca", memlock: false}]')
    assert seen(paths).warnings == ()
