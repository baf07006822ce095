"""The files of NCCL and UCX that Allocate makes and ADD completes."""

import errno
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from base import files
from base.paths import Paths
from deviceplugin.allocate import job_config
from deviceplugin.allocate.container_devices import allocation
from deviceplugin.allocate.job_config import INSIDE, PartitionKey
from deviceplugin.kubelet.plugin_server import Rejected
from host.sysfs.discovery import hcas
from tests.unit.deviceplugin.made import pool
from tests.unit.host import servers

RESOURCE = "rdma/hca"
HCAS = {"NCCL_IB_HCA": "=mlx5_0", "UCX_NET_DEVICES": "mlx5_0:1"}


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(state=tmp_path / "state", proc=tmp_path / "proc", sys=tmp_path / "sys")


def _made(paths: Paths, *ids: str, tc: int | None = None) -> Path:
    return job_config.make(paths, RESOURCE, ids, HCAS, tc)


def _lines(place: Path, name: str) -> list[str]:
    header, *lines = (place / name).read_text().splitlines()
    assert header.startswith("#")
    assert "=" not in header  # NCCL 2.23 knows no comments: it would set a variable
    return lines


def test_a_container_gets_files_that_any_user_can_read(paths: Paths) -> None:
    place = _made(paths, "b", "a", tc=106)
    assert place == job_config.directory(paths, RESOURCE, "a")
    assert _lines(place, "nccl.conf") == ["NCCL_IB_HCA==mlx5_0", "NCCL_IB_TC=106"]
    assert _lines(place, "ucx.conf") == [
        "UCX_NET_DEVICES=mlx5_0:1",
        "UCX_IB_TRAFFIC_CLASS=106",
    ]
    assert {oct(path.stat().st_mode & 0o777) for path in place.iterdir()} == {"0o644"}
    assert place.stat().st_mode & 0o777 == 0o755
    assert job_config.ENVIRONMENT == {
        "NCCL_CONF_FILE": "/run/podfabric/job/nccl.conf",
        "UCX_CONFIG_DIR": "/run/podfabric/job",
    }


def test_an_add_writes_the_pkey_by_value_and_index(paths: Paths) -> None:
    place = _made(paths, "a")
    ids = [(RESOURCE, "a"), (RESOURCE, "of a container without files")]
    job_config.set_pkey(paths, ids, PartitionKey(0x8001, 3))
    assert _lines(place, "nccl.conf") == [
        "NCCL_IB_HCA==mlx5_0",
        "NCCL_IB_PKEY_VALUE=0x8001",
        "NCCL_IB_PKEY=3",
    ]
    assert _lines(place, "ucx.conf") == ["UCX_NET_DEVICES=mlx5_0:1", "UCX_IB_PKEY=0x0001"]
    job_config.set_pkey(paths, ids, PartitionKey(0x0002, None))
    assert _lines(place, "nccl.conf") == ["NCCL_IB_HCA==mlx5_0", "NCCL_IB_PKEY_VALUE=0x0002"]
    job_config.set_pkey(paths, ids, None)
    assert _lines(place, "nccl.conf") == ["NCCL_IB_HCA==mlx5_0"]
    assert len(list(place.parent.iterdir())) == 1


def test_a_new_container_gets_no_line_of_an_earlier_container(paths: Paths) -> None:
    old = _made(paths, "a", tc=106)
    older = _made(paths, "b")
    job_config.set_pkey(paths, [(RESOURCE, "a")], PartitionKey(0x8001, 0))
    assert _made(paths, "a", "b") == old
    assert _lines(old, "nccl.conf") == ["NCCL_IB_HCA==mlx5_0"]
    assert not older.exists()  # an ADD must not write there


def test_a_virtual_machines_topology_is_copied(paths: Paths) -> None:
    on_host = paths.proc / "1/root/run/nvidia-topologyd/virtualTopology.xml"
    on_host.parent.mkdir(parents=True)
    on_host.write_text("<system/>")
    place = _made(paths, "a")
    assert f"NCCL_TOPO_FILE={INSIDE}/topology.xml" in _lines(place, "nccl.conf")
    assert (place / "topology.xml").read_text() == "<system/>"
    on_host.write_bytes(b"x" * ((1 << 20) + 1))
    assert _lines(_made(paths, "a"), "nccl.conf") == ["NCCL_IB_HCA==mlx5_0"]
    assert not (place / "topology.xml").exists()


def test_the_files_go_with_the_allocation(paths: Paths) -> None:
    kept, gone = _made(paths, "a"), _made(paths, "b")
    (gone / ".nccl.conf.tmp").write_text("of a killed writer")
    job_config.remove_stale(paths, lambda: {(RESOURCE, "a")})
    assert kept.exists()
    assert not gone.exists()


def test_a_directory_made_during_the_removal_stays(paths: Paths) -> None:
    _made(paths, "a")

    def keys() -> set[tuple[str, str]]:
        _made(paths, "new")
        return set()

    job_config.remove_stale(paths, keys)
    assert list((paths.devices / "jobs").iterdir()) == [
        job_config.directory(paths, RESOURCE, "new")
    ]


@pytest.mark.root
def test_allocate_mounts_the_files_read_only_for_one_pool(tmp_path: Path) -> None:
    server = servers.dgx(tmp_path, nodes=True)
    server = replace(server, state=tmp_path / "state")
    current = {hca.id: hca for hca in hcas(server)}
    of = pool([hca for hca in current.values() if hca.rdma], traffic_class=106)
    first = of.slots[0].id
    answer = allocation(server, of, [first], {first}, current).answer
    (mount,) = answer.mounts
    place = job_config.directory(server, of.config.resource, first)
    assert (mount.container_path, mount.host_path) == (INSIDE, str(place))
    assert mount.read_only
    assert answer.envs["NCCL_CONF_FILE"] == f"{INSIDE}/nccl.conf"
    assert f"NCCL_IB_HCA={answer.envs['NCCL_IB_HCA']}" in _lines(place, "nccl.conf")
    assert "NCCL_IB_TC=106" in _lines(place, "nccl.conf")
    other = allocation(server, of, [first], {first}, current, fabric_env=False).answer
    assert not other.mounts
    assert "NCCL_CONF_FILE" not in other.envs


@pytest.mark.root
def test_a_full_disk_refuses_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = servers.dgx(tmp_path, nodes=True)
    server = replace(server, state=tmp_path / "state")
    current = {hca.id: hca for hca in hcas(server)}
    of = pool([hca for hca in current.values() if hca.rdma])
    first = of.slots[0].id

    def full(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(files, "write_atomically", full)
    with pytest.raises(
        Rejected, match=r"cannot write .*nccl\.conf: No space left on device: check"
    ):
        allocation(server, of, [first], {first}, current)
