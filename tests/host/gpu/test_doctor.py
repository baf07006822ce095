"""`podfabric doctor` with a driver: what it answers, and which tier each GPU can have."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from cli import doctor
from cli.checks import Finding
from cli.this_node import ThisNode
from tests.host.gpu.driver_root import installed, paths_with
from tests.standin.gpus import GIB, Behaviour, gpus
from tools import build_hook, build_shim

TWO = gpus(2, bytes=16 * GIB)
R580, R615 = "580.65.06", "615.20.01"
Examine = Callable[[str], list[Finding]]


@pytest.fixture
def examine(tmp_path: Path) -> Iterator[Callable[..., Examine]]:
    """Makes a node with two GPUs in /proc and a driver that has `count` of them."""
    with ExitStack() as stack:

        def made(driver: str = R615, *, count: int = 2) -> Examine:
            paths = replace(
                paths_with(tmp_path, TWO),
                dev=tmp_path / "dev",
                etc=tmp_path / "etc",
                state=tmp_path / "state",
                kubelet=tmp_path / "kubelet",
            )
            paths.etc.mkdir()
            paths.config.write_text(
                "gpus: [{mode: units}]\ngpuLimits: {enforce: [kernel, shim]}\n"
                "devices: {gpuBinding: start}\n"
            )
            (paths.sys / "fs/cgroup").mkdir(parents=True)
            (paths.sys / "fs/cgroup/cgroup.controllers").touch()
            root = tmp_path / "driver"
            stack.enter_context(installed(root, TWO[:count], Behaviour(driver=driver)))

            def examined(check: str) -> list[Finding]:
                node = ThisNode(paths, tolerant=True)
                node.driver_root = root
                return doctor.examine(node, [each for each in doctor.CHECKS if each[0] == check])

            return examined

        yield made


def _install(directory: Path) -> None:
    """What `podfabric install --gpu` installs."""
    for path in (*build_shim.build("", directory), build_hook.build("", directory)):
        path.chmod(0o755)


def test_the_driver_answers_for_every_gpu(examine: Callable[..., Examine]) -> None:
    (found,) = examine()("GPU driver")

    assert (found.status, found.seen) == ("ok", f"driver {R615} answers for 2 GPUs")


def test_a_gpu_that_the_driver_does_not_tell_of_fails(examine: Callable[..., Examine]) -> None:
    (found,) = examine(count=1)("GPU driver")

    assert found.status == "failed"
    assert "does not answer for 0000:11:00.0" in found.seen


@pytest.mark.parametrize(
    ("driver", "library", "status", "words"),
    [
        (R615, True, "ok", "kernel is the strongest"),
        (R580, True, "ok", "shim is the strongest that can be had (not kernel: driver 580.65.06"),
        (R615, False, "warning", "none is the strongest that can be had: not kernel: libpfcuda.so"),
        (R580, False, "warning", "none is the strongest that can be had: not kernel: driver 580"),
    ],
)
def test_the_strongest_tier_is_named_with_what_keeps_gpus_from_a_stronger_one(
    examine: Callable[..., Examine],
    tmp_path: Path,
    driver: str,
    library: bool,
    status: str,
    words: str,
) -> None:
    ask = examine(driver)
    if library:
        _install(tmp_path / "state/gpu/shim")

    (found,) = ask("GPU tiers")

    assert found.status == status
    assert f"GPU0, GPU1: {words}" in found.seen


def test_libraries_that_were_built_are_ones_that_containers_can_load(
    examine: Callable[..., Examine], tmp_path: Path
) -> None:
    ask = examine()
    _install(tmp_path / "state/gpu/shim")

    assert [each.status for each in ask("GPU libraries")] == ["ok"]


def test_what_mps_lacks_is_named(examine: Callable[..., Examine], tmp_path: Path) -> None:
    ask = examine(R580)
    _install(tmp_path / "state/gpu/shim")
    (tmp_path / "etc/config.yaml").write_text(
        "gpus: [{mode: units}]\ndevices: {gpuBinding: start}\n"
        f"gpuLimits: {{enforce: [mps, shim], mps: {{pipes: {tmp_path}/mps, shm: /dev/shm}}}}\n"
    )

    (found,) = ask("GPU tiers")
    assert (
        f"not mps: no MPS control daemon listens at {tmp_path}/mps/control: No such" in found.seen
    )
    (tmp_path / "mps").mkdir()
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(f"{tmp_path}/mps/control")
        daemon.listen()
        (found,) = ask("GPU tiers")
    assert "not mps: the GPU is not in the compute mode EXCLUSIVE_PROCESS" in found.seen


def test_a_level_of_cgroups_without_dmem_is_named(
    examine: Callable[..., Examine], tmp_path: Path
) -> None:
    ask = examine()
    _install(tmp_path / "state/gpu/shim")
    cgroups = tmp_path / "sys/fs/cgroup"
    pods = cgroups / "kubepods.slice"
    pods.mkdir()
    (cgroups / "dmem.capacity").write_text("nvidia/00000000:10:00.0/vidmem 17179869184\n")
    (cgroups / "cgroup.subtree_control").write_text("cpu memory dmem\n")
    (pods / "cgroup.subtree_control").write_text("cpu memory\n")

    found = ask("GPU tiers")

    assert [each.status for each in found] == ["ok", "warning"]
    assert "shim is the strongest" in found[0].seen
    assert f"{pods}/cgroup.subtree_control lacks dmem" in found[1].seen
    (pods / "cgroup.subtree_control").write_text("cpu memory dmem\n")
    assert [each.status for each in ask("GPU tiers")] == ["ok"]


def test_memory_of_gpus_is_asked_of_the_driver_where_pools_do_not_say_it(
    examine: Callable[..., Examine],
) -> None:
    """The GPUs have no nodes here, so they fail for that, and not for their memory."""
    found = examine()("GPU nodes")

    assert "nvidia0: No such file" in found[0].seen
    assert not any("how much memory" in each.seen for each in found)
