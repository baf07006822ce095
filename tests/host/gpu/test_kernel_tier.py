"""Limits that the driver enforces for a container's cgroup: set, read back, or the start fails."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpu import kernel_tier, nvml
from gpu.group_limits import NO_LIMIT, Limit
from gpu.kernel_tier import KernelTierError, limit, unsupported
from gpu.nvml import Nvml
from gpu.tiers import choose
from tests.host.gpu.driver_root import installed
from tests.host.gpu.pods import made_container
from tests.standin.gpus import GIB, Behaviour, Failure, Node, gpus

TWO = gpus(2, bytes=16 * GIB)
FIRST, SECOND = (gpu.uuid for gpu in TWO)
R580, R615 = "580.65.06", "615.20.01"

Opened = tuple[Nvml, Node, Path]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Makes a driver, NVML of it, and the directory of a container's cgroup."""
    with ExitStack() as stack:

        def made(
            driver: str = R615, *, dmem: bool = False, failures: tuple[Failure, ...] = ()
        ) -> Opened:
            cgroups = tmp_path / "cgroup"
            leaf = cgroups / "kubepods/pod/leaf"
            leaf.mkdir(parents=True)
            (cgroups / "cgroup.controllers").touch()
            if dmem:
                (cgroups / "dmem.capacity").touch()
                (leaf / "dmem.max").touch()
            behaviour = Behaviour(driver=driver, cgroups=str(cgroups), failures=failures)
            node = stack.enter_context(installed(tmp_path / "driver", TWO, behaviour))
            opened = nvml.open_driver(node.file.parent)
            stack.callback(opened.close)
            return opened, node, leaf

        yield made


@pytest.mark.parametrize(("dmem", "backend"), [(True, "dmem"), (False, "misc")])
def test_each_gpu_of_the_container_is_limited_softly_by_nothing(
    host: Callable[..., Opened], dmem: bool, backend: str
) -> None:
    opened, node, leaf = host(dmem=dmem)
    limits = [Limit(FIRST, 2 * GIB, 1.0), Limit(SECOND, NO_LIMIT, 1.0)]
    for _ in range(2):
        assert limit(opened, leaf, limits) == backend
    held = {(each.gpu, each.soft, each.hard) for each in node.read().limits}
    assert held == {(0, 0, 2 * GIB), (1, 0, 2**64 - 1)}
    if dmem:
        assert (leaf / "dmem.max").read_text().endswith("vidmem max\n")


def test_a_level_without_dmem_fails_the_start_and_is_named(host: Callable[..., Opened]) -> None:
    opened, _, leaf = host(dmem=True)
    (leaf / "dmem.max").unlink()
    with pytest.raises(KernelTierError, match=r"write \+dmem into cgroup.subtree_control"):
        limit(opened, leaf, [Limit(FIRST, GIB, 1.0)])
    cgroups = leaf.parents[2]
    for directory, enabled in ((cgroups, "cpu dmem"), (cgroups / "kubepods", "cpu")):
        (directory / "cgroup.subtree_control").write_text(f"{enabled}\n")
    assert kernel_tier.without_dmem(leaf, cgroups) == cgroups / "kubepods"
    for directory in (cgroups / "kubepods", leaf.parent):
        (directory / "cgroup.subtree_control").write_text("dmem\n")
    assert kernel_tier.without_dmem(leaf, cgroups) is None


@pytest.mark.parametrize("pods", ["kubepods", "kubepods.slice"])
def test_the_first_level_above_pods_without_dmem_is_an_obstacle_where_the_driver_uses_that(
    tmp_path: Path, pods: str
) -> None:
    (tmp_path / pods).mkdir()
    (tmp_path / "cgroup.subtree_control").write_text("cpu dmem\n")
    capacity = tmp_path / "dmem.capacity"
    capacity.write_text("drm/0000:03:00.0/vram0 8514437120\n")  # another driver's
    assert kernel_tier.node_backend(tmp_path) == "misc"
    assert kernel_tier.dmem_obstacle(tmp_path) is None
    capacity.write_text("nvidia/00000000:10:00.0/vidmem 17179869184\n")
    assert kernel_tier.node_backend(tmp_path) == "dmem"
    assert f"{tmp_path}/{pods}/cgroup.subtree_control lacks dmem" in (
        kernel_tier.dmem_obstacle(tmp_path) or ""
    )
    (tmp_path / pods / "cgroup.subtree_control").write_text("cpu dmem\n")
    assert kernel_tier.dmem_obstacle(tmp_path) is None


@pytest.mark.parametrize("result", [3, 4, 6, 999])
@pytest.mark.parametrize("call", ["nvmlDeviceSetMemoryLimits_v1", "nvmlDeviceGetMemoryLimits_v1"])
def test_a_failure_of_the_driver_fails_the_start(
    host: Callable[..., Opened], call: str, result: int
) -> None:
    opened, _, leaf = host(failures=(Failure(call, 2, result),))
    with pytest.raises(KernelTierError, match=SECOND):
        limit(opened, leaf, [Limit(FIRST, GIB, 1.0), Limit(SECOND, GIB, 1.0)])


def test_another_limit_than_was_set_fails_the_start(
    host: Callable[..., Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, _, leaf = host()
    opened.set_cgroup_limit(FIRST, leaf, 3 * GIB)
    monkeypatch.setattr(opened, "set_cgroup_limit", lambda uuid, cgroup, hard: None)
    with pytest.raises(KernelTierError, match=f"was set, and the driver has {3 * GIB}"):
        limit(opened, leaf, [Limit(FIRST, GIB, 1.0)])


def test_a_cgroup_that_has_vanished_fails_the_start(host: Callable[..., Opened]) -> None:
    opened, _, leaf = host()
    leaf.rmdir()
    with pytest.raises(KernelTierError, match="leaf"):
        limit(opened, leaf, [Limit(FIRST, GIB, 1.0)])


def test_an_old_driver_makes_gpus_unhealthy_where_the_kernel_tier_is_required(
    host: Callable[..., Opened],
) -> None:
    opened, _, leaf = host(R580)
    cgroups = leaf.parents[2]
    choice = choose(
        {"kernel": lambda: unsupported(opened, FIRST, cgroups), "shim": lambda: None},
        {"kernel", "shim"},
        "kernel",
    )
    assert choice.tier == "shim"
    assert choice.unhealthy is not None
    assert "driver 580.65.06 has no memory limits of cgroups: R615 or later" in choice.unhealthy
    with pytest.raises(KernelTierError, match="this driver has no memory limits of cgroups"):
        limit(opened, leaf, [Limit(FIRST, GIB, 1.0)])


def test_what_a_new_driver_needs_of_the_node(host: Callable[..., Opened]) -> None:
    opened, _, leaf = host()
    cgroups = leaf.parents[2]
    assert unsupported(opened, FIRST, cgroups) is None
    (cgroups / "cgroup.controllers").unlink()
    assert unsupported(opened, FIRST, cgroups) == f"{cgroups} is not of cgroups version 2"


def test_the_cgroup_of_a_process_is_found_below_the_tree(tmp_path: Path) -> None:
    with made_container(version=2) as container:
        made = tmp_path / "kubepods/burstable" / f"pod{container.container.pod_uid}"
        directory = made / container.container.id
        client = container.client(tmp_path / "none")
        with client:
            with pytest.raises(KernelTierError, match=f"of process {client.pid}"):
                kernel_tier.cgroup_of(client.pid, tmp_path)
            directory.mkdir(parents=True)
            assert kernel_tier.cgroup_of(client.pid, tmp_path) == directory
    with pytest.raises(KernelTierError, match="No such file"):
        kernel_tier.cgroup_of(client.pid, tmp_path)


FIND = """
import sys
from pathlib import Path
from gpu import kernel_tier
print(Path(f"/proc/{sys.argv[1]}/cgroup").read_text().splitlines()[-1])
print(kernel_tier.cgroup_of(int(sys.argv[1]), Path(sys.argv[2])))
"""


def test_the_cgroup_of_a_process_is_found_from_a_cgroup_namespace(tmp_path: Path) -> None:
    """As an agent sees it whose container has a cgroup namespace of its own."""
    with made_container(version=2) as own, made_container(version=2) as container:
        made = tmp_path / "kubepods/burstable" / f"pod{container.container.pod_uid}"
        directory = made / container.container.id
        directory.mkdir(parents=True)
        with container.client(tmp_path / "none") as client:
            script = 'read _; exec unshare -C "$@"'
            command = ["sh", "-c", script, "sh", sys.executable, "-c", FIND, str(client.pid)]
            with subprocess.Popen(
                [*command, tmp_path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parents[3],
            ) as finding:
                own.take(finding.pid)
                printed, _ = finding.communicate("go\n")
    seen, found = printed.splitlines()
    assert seen.startswith("0::/../../")
    assert found == str(directory)
