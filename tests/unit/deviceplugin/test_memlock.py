"""Locked memory: the key of a pool, the CDI file, and the runtimes that would refuse the device."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from base.paths import Paths
from deviceplugin.allocate import cdi, memlock
from deviceplugin.allocate.container_devices import allocation
from deviceplugin.allocate.memlock import HOOK
from deviceplugin.api.v1beta1_pb2 import CDIDevice, ContainerAllocateResponse
from deviceplugin.kubelet.plugin_server import Rejected
from deviceplugin.kubelet.records import PodDevices
from deviceplugin.pools.formats import parse
from deviceplugin.pools.pool_config import ConfigError, PoolConfig
from deviceplugin.reconcile import agree
from tests.unit.deviceplugin.made import RESOURCE, A, hca, pool

UNLIMITED, GI_64 = "podfabric.io/memlock=unlimited", "podfabric.io/memlock=68719476736"
POOL = PoolConfig(resource=RESOURCE)
ON_HOST = "/somewhere/cni"  # the agent's container has the directory at another path


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    """A node whose runtime has the hook."""
    names = ("proc", "cdi", "kubelet", "cni_bin")
    made = Paths(host_cni_bin=Path(ON_HOST), **{name: tmp_path / name for name in names})
    hook = _host(made, f"{ON_HOST}/{HOOK}", "")
    hook.chmod(0o755)
    return made


def _host(paths: Paths, name: str, text: str) -> Path:
    """Write a file of the host."""
    file = paths.proc / "1/root" / name.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def _without_hook(paths: Paths) -> None:
    (paths.proc / f"1/root{ON_HOST}/{HOOK}").unlink()


def _devices(paths: Paths) -> dict[str, Any]:
    """The edits of each device in our file, by its qualified name."""
    (file,) = paths.cdi.iterdir()
    found = json.loads(file.read_text())
    return {f"{found['kind']}={each['name']}": each["containerEdits"] for each in found["devices"]}


def _hook(value: str) -> dict[str, Any]:
    path = f"{ON_HOST}/{HOOK}"
    return {"hooks": [{"hookName": "createRuntime", "path": path, "args": [HOOK, value]}]}


def _holds(paths: Paths, *names: str) -> None:
    """Write the kubelet's checkpoint with one container that got these CDI names."""
    answer = ContainerAllocateResponse(cdi_devices=[CDIDevice(name=name) for name in names])
    given = base64.b64encode(answer.SerializeToString()).decode()
    row = {"PodUID": "u", "ContainerName": "c", "ResourceName": RESOURCE, "AllocResp": given}
    paths.device_plugins.mkdir(parents=True, exist_ok=True)
    file = paths.device_plugins / "kubelet_internal_checkpoint"
    file.write_text(json.dumps({"Data": {"PodDeviceEntries": [row]}}))


@pytest.mark.parametrize(
    ("written", "value"),
    [("", "unlimited"), (", memlock: unlimited", "unlimited"), (", memlock: 64Gi", "68719476736"),
     (", memlock: 65536", "65536"), (', memlock: ""', ""), (", memlock: false", "")],
)  # fmt: skip
def test_values_of_the_key(written: str, value: str) -> None:
    (found,) = parse(f"pools: [{{name: rdma/hca{written}}}]".encode(), "f").pools
    assert found.memlock == value


@pytest.mark.parametrize("written", ["true", "Unlimited", "-1", "64 GB", "1.5", "[]", "2000Ti"])
def test_other_values_of_the_key_are_refused(written: str) -> None:
    with pytest.raises(ConfigError, match=r"pools\[0\]\.memlock: "):
        parse(f"pools: [{{name: rdma/hca, memlock: {written}}}]".encode(), "f")


def test_the_file_names_the_hook_on_the_host(paths: Paths) -> None:
    assert memlock.device(paths, POOL) == UNLIMITED
    assert memlock.device(paths, replace(POOL, memlock="68719476736")) == GI_64
    assert _devices(paths) == {UNLIMITED: _hook("unlimited"), GI_64: _hook("68719476736")}
    assert memlock.device(paths, replace(POOL, memlock="")) is None


@pytest.mark.parametrize("named", [False, True])
def test_allocate_adds_the_device(paths: Paths, named: bool) -> None:
    of = pool([hca(A, driver="vfio-pci")], rdma=False, cdi=named)
    answer = allocation(paths, of, [A], {A}, {A: of.hcas[0]}).answer
    assert [device.name for device in answer.cdi_devices] == [UNLIMITED]
    paths.cdi.rename(paths.cdi.with_name("elsewhere"))
    paths.cdi.write_text("no directory")
    with pytest.raises(Rejected, match=r"cannot write the CDI specification .*memlock\.json"):
        allocation(paths, of, [A], {A}, {A: of.hcas[0]})
    paths.cdi.unlink()
    _without_hook(paths)
    assert not allocation(paths, of, [A], {A}, {A: of.hcas[0]}).answer.cdi_devices


def test_the_file_keeps_what_containers_hold_and_outlives_other_files(paths: Paths) -> None:
    memlock.device(paths, POOL)
    _holds(paths, GI_64, "podfabric.io/rdma-hca=x")
    for offered, left in (([POOL], {UNLIMITED, GI_64}), ([], {GI_64})):
        assert memlock.describe(paths, offered) is None
        cdi.remove_others(paths, [])
        assert set(_devices(paths)) == left
    _holds(paths)
    memlock.describe(paths, [])
    assert list(paths.cdi.iterdir()) == []


@pytest.mark.parametrize("content", ["{", "[]", '{"devices":[{}]}', '{"devices":3}', "\xff"])
def test_damaged_records_remove_nothing(paths: Paths, content: str) -> None:
    memlock.device(paths, POOL)
    _holds(paths)
    (paths.device_plugins / "kubelet_internal_checkpoint").write_text("{")
    memlock.describe(paths, [])
    assert set(_devices(paths)) == {UNLIMITED}
    (file,) = paths.cdi.iterdir()
    file.write_bytes(content.encode("latin-1"))
    memlock.device(paths, POOL)
    assert _devices(paths) == {UNLIMITED: _hook("unlimited")}


@pytest.mark.parametrize("gone", [True, False])
def test_without_the_hook_containers_can_still_restart(paths: Paths, gone: bool) -> None:
    memlock.device(paths, POOL)
    _holds(paths, UNLIMITED)
    if gone:
        _without_hook(paths)
        found = memlock.describe(paths, [POOL]) or ""
        assert f"the host has no executable {ON_HOST}/{HOOK}" in found
    else:
        memlock.retire(paths)
    assert _devices(paths) == {UNLIMITED: {"env": ["PODFABRIC_MEMLOCK=unlimited"]}}
    _holds(paths)
    memlock.retire(paths)
    assert list(paths.cdi.iterdir()) == []


OFF, DIRECTORIES = "enable_cdi = false", 'cdi_spec_dirs = [\n  "/etc/cdi",\n  "/var/cdi/x" ]'


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"etc/containerd/config.toml": f"[a]\n  {OFF}"}, OFF),
        ({"var/lib/rancher/k3s/agent/etc/containerd/config.toml": OFF}, OFF),
        ({"etc/cri/conf.d/20.toml": DIRECTORIES}, "cdi_spec_dirs without "),
        ({"etc/crio/crio.conf.d/10.conf": "cdi_spec_dirs = []"}, "cdi_spec_dirs without "),
        ({"etc/containerd/config.toml": OFF, "etc/containerd/conf.d/9.toml": "enable_cdi = true"},
         None),
        ({"etc/containerd/config.toml": f"# {OFF}\n# {DIRECTORIES}"}, None),
        ({"etc/containerd/config.toml": "cdi_spec_dirs = ['/etc/cdi', 'CDI/']"}, None),
        ({"etc/containerd/config.toml/x": OFF}, None),
        ({"etc/containerd/certs.d/x/hosts.toml": OFF}, None),
    ],
)  # fmt: skip
def test_a_runtime_that_would_refuse_the_device_gets_none(
    paths: Paths, files: dict[str, str], words: str | None
) -> None:
    for name, text in files.items():
        _host(paths, name, text.replace("CDI", str(paths.cdi)))
    found = memlock.device(paths, POOL)
    why = memlock.describe(paths, [POOL])
    assert found == (UNLIMITED if words is None else None)
    assert why is words is None or (why is not None and words is not None and words in why)


def test_the_kubelets_record_of_locked_memory_is_no_hca() -> None:
    row = PodDevices(container="c", resource=RESOURCE, ids=(), cdi=(UNLIMITED,))
    assert agree([], row)
    assert not agree([], replace(row, cdi=(UNLIMITED, cdi.qualified(RESOURCE, A))))
