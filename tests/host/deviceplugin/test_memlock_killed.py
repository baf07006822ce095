"""The device plugin is killed between the CDI file for locked memory and the answer of Allocate."""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from base.paths import Paths
from deviceplugin.allocate import cdi
from deviceplugin.allocate.memlock import HOOK
from tests.host.deviceplugin.processes import configure, running
from tests.kubelet import Kubelet, PodRejected

HCA, NAME = "rdma/hca", "podfabric.io/memlock=unlimited"
REQUEST = {"name": "main", "limits": {HCA: 1}}


@pytest.fixture
def node(server: Paths) -> Paths:
    """A node whose runtime has the hook, with a pool that writes its CDI file after the hook's."""
    made = replace(server, host_cni_bin=Path("/opt/cni/bin"))
    hook = made.proc / f"1/root/opt/cni/bin/{HOOK}"
    hook.parent.mkdir(parents=True)
    hook.touch(0o755)
    configure(made, {"name": HCA, "slots": 4, "cdi": True})
    return made


@pytest.fixture
def kubelet(node: Paths) -> Iterator[Kubelet]:
    with Kubelet(node.kubelet) as started:
        yield started


@pytest.mark.parametrize("written", [True, False])
def test_the_next_allocation_has_the_limit(node: Paths, kubelet: Kubelet, written: bool) -> None:
    file, of_pool = node.cdi / f"{HOOK}.json", cdi.path(node, HCA)
    with running(node) as first:
        kubelet.wait(lambda: kubelet.allocatable(HCA) == 32)
        assert kubelet.admit("before", [REQUEST]).containers["main"].cdi[-1] == NAME
        if written:
            file.unlink()
        of_pool.unlink()
        os.mkfifo(of_pool)  # Allocate waits here

        def admit() -> None:
            with suppress(PodRejected):
                kubelet.admit("worker", [REQUEST])

        client = threading.Thread(target=admit)
        client.start()
        with of_pool.open("wb", buffering=0):  # returns when the plugin reads
            assert NAME.partition("=")[2] in file.read_text()
            first.kill()
        client.join()
        assert "worker" not in kubelet.pods
    of_pool.unlink()
    with running(node):
        kubelet.wait(lambda: kubelet.allocatable(HCA) == 32)
        assert kubelet.admit("worker", [REQUEST]).containers["main"].cdi[-1] == NAME
        (device,) = json.loads(file.read_text())["devices"]
        assert (device["name"], list(device["containerEdits"])) == ("unlimited", ["hooks"])
        assert not [path for path in node.cdi.iterdir() if path not in (file, of_pool)]
