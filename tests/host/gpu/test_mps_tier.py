"""MPS on a node: whether its daemon listens, which mode the GPU has, and what a container gets."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from base.paths import Paths
from gpu import mps_tier, nvml
from gpu.group_limits import NO_LIMIT, Limit
from gpu.mps_tier import MpsTier
from gpu.nvml import Nvml
from gpu.settings import MpsDirectories
from host.errors import HostError
from tests.host.gpu.driver_root import installed
from tests.standin.gpus import GIB, MIB, Behaviour, Failure, gpus

DEFAULT, EXCLUSIVE_PROCESS = 0, 3
(ONE,) = gpus(1, compute_mode=EXCLUSIVE_PROCESS)
HALF = Limit(ONE.uuid, 2 * GIB + MIB // 2, 0.5)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Nvml]:
    """Of whose calls for the compute mode the second one fails."""
    behaviour = Behaviour(failures=(Failure("nvmlDeviceGetComputeMode", 2, 999),))
    with installed(tmp_path / "driver", (ONE,), behaviour) as node:
        opened = nvml.open_driver(node.file.parent)
        yield opened
        opened.close()


@pytest.fixture
def pipes(tmp_path: Path) -> Path:
    """As deep as a path of the host may be: longer than the address of a socket."""
    directory: Path = tmp_path / "host" / "/".join(["deep"] * 30)
    directory.mkdir(parents=True)
    return directory


@pytest.fixture
def tier(tmp_path: Path, pipes: Path, driver: Nvml) -> MpsTier:
    """With the host's root elsewhere, as an agent in a container has it."""
    inside = Path("/") / pipes.relative_to(tmp_path / "host")
    made = MpsTier(
        Paths(host=tmp_path / "host"), MpsDirectories(pipes=inside, shm=Path("/dev/shm"))
    )
    made.learn(driver, ONE.uuid)
    return made


def listening(pipes: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, kind)
    directory = os.open(pipes, os.O_PATH)
    made.bind(f"/proc/self/fd/{directory}/control")
    os.close(directory)
    made.listen()
    return made


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_a_container_gets_its_part_of_the_multiprocessors_and_whole_mebibytes(
    tier: MpsTier, pipes: Path, kind: socket.SocketKind
) -> None:
    with listening(pipes, kind):
        assert tier.obstacle(ONE.uuid) is None
        edits = tier.edits(HALF)
        whole = tier.edits(Limit(ONE.uuid, NO_LIMIT, 1.0))
    assert edits.variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
    assert edits.variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=2048M"
    assert edits.variables["CUDA_MPS_PIPE_DIRECTORY"].startswith("/deep/deep/")
    assert [file.container for file in edits.files][1] == "/dev/shm"
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in whole.variables


def test_what_is_no_listening_socket_refuses_the_start(tier: MpsTier, pipes: Path) -> None:
    control = pipes / "control"
    control.touch()
    with pytest.raises(HostError, match="no MPS control daemon listens at /deep"):
        tier.edits(HALF)
    control.unlink()
    control.mkdir()
    with pytest.raises(HostError, match="no MPS control daemon listens at /deep"):
        tier.edits(HALF)
    control.rmdir()
    os.mkfifo(control)
    with pytest.raises(HostError, match="no MPS control daemon listens at /deep"):
        tier.edits(HALF)
    control.unlink()
    with listening(pipes):
        pass  # the daemon has ended, and left its socket
    with pytest.raises(HostError, match="Connection refused"):
        tier.edits(HALF)


def test_the_compute_mode_must_be_known_and_lately(
    tier: MpsTier, pipes: Path, driver: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening(pipes):
        tier.learn(driver, ONE.uuid)
        with pytest.raises(HostError, match="the GPU's compute mode is not known: nvmlDevice"):
            tier.edits(HALF)
        tier.learn(driver, ONE.uuid)
        assert tier.edits(HALF).variables
        monkeypatch.setattr(mps_tier, "OLD", -1.0)
        with pytest.raises(HostError, match="the driver does not tell the GPU's compute mode"):
            tier.edits(HALF)
        with pytest.raises(HostError, match="the driver does not tell"):
            tier.edits(Limit("GPU-other", GIB, 0.5))


def test_a_daemon_is_not_enough_where_programs_can_do_without_it(
    tier: MpsTier, pipes: Path, driver: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no server here, as before its first client. The mode makes that enough, or not."""
    with listening(pipes):
        assert tier.edits(HALF).variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=2048M"
        monkeypatch.setattr(driver, "compute_mode", lambda uuid: DEFAULT)  # someone set it back
        tier.learn(driver, ONE.uuid)
        with pytest.raises(HostError, match="not in the compute mode EXCLUSIVE_PROCESS"):
            tier.edits(HALF)


def test_without_directories_there_is_no_mps(tmp_path: Path) -> None:
    tier = MpsTier(Paths(host=tmp_path), None)
    assert "gpuLimits.mps does not say" in (tier.obstacle(ONE.uuid) or "")
    with pytest.raises(HostError, match="MPS would not limit the container"):
        tier.edits(HALF)
