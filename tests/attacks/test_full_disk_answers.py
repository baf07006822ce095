"""The answers of the real processes to a runtime and a kubelet while a disk is full."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from deviceplugin import checkpoint
from tests.attacks.full_disk import SmallDisk, small_disk
from tests.host.deviceplugin.node import HCA, SHARED, Node, container
from tests.host.deviceplugin.processes import made_server, running
from tests.kubelet.devices import PodRejected
from tests.kubelet.kubelet import Kubelet
from tests.plugins.service import install_launchers
from tests.runtime import Outcome, Runtime
from tests.waiting import until

IPAM = "podfabric-ipam"
CONFIG = {
    "cniVersion": "1.1.0",
    "name": "n1",
    "type": IPAM,
    "ipam": {"type": IPAM, "range": "10.0.0.0/24"},
}


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory with a short path, for sockets."""
    directory = Path(tempfile.mkdtemp(prefix="pf-"))
    yield directory
    shutil.rmtree(directory)


@contextmanager
def runtime_of(through: str, root: Path, disk: SmallDisk) -> Iterator[Runtime]:
    """A runtime whose IPAM plugin has its store on the disk, with or without an agent."""
    paths = made_server(root)
    paths = msgspec.structs.replace(paths, state=disk.directory)
    shutil.rmtree(paths.kubelet, ignore_errors=True)  # no device plugin
    paths.config.write_text('agent:\n  listen: ""\n')
    environ = {
        **os.environ,
        "PODFABRIC_SOCKET": str(paths.agent_socket),
        "PODFABRIC_RUN": str(paths.run),
        "PODFABRIC_STATE": str(paths.state),
        "PODFABRIC_ETC": str(paths.etc),
    }
    if through == "executable":
        yield Runtime(environ=environ)
        return
    install_launchers(root / "bin", [IPAM])
    with running(paths, "agent") as agent:
        until(lambda: paths.agent_socket.exists() or agent.process.poll() is not None)
        assert agent.process.poll() is None, agent.log
        yield Runtime(bin_dir=root / "bin", environ=environ)


def call(
    runtime: Runtime, verb: str, container_id: str, previous: Mapping[str, object] | None = None
) -> Outcome:
    return runtime.call(verb, CONFIG, container_id=container_id, netns="/none", previous=previous)


def address_of(outcome: Outcome) -> str:
    assert outcome.exit_code == 0, outcome
    (ip,) = outcome.document["ips"]
    return str(ip["address"])


def require_refused(outcome: Outcome) -> None:
    """The error says that nothing was changed, and what to do."""
    assert outcome.exit_code == 1, outcome
    assert outcome.document["code"] == 5, outcome
    assert "nothing was changed; see that" in outcome.document["msg"]
    assert "not full" in outcome.document["msg"]


@pytest.mark.parametrize("through", ["executable", "agent"])
def test_answers_to_a_runtime_are_true_while_the_disk_is_full(through: str, root: Path) -> None:
    with small_disk() as disk, runtime_of(through, root, disk) as runtime:
        first = call(runtime, "ADD", "c1")
        assert first.exit_code == 0, first
        for verb, container_id in (("ADD", "c2"), ("DEL", "c1")):
            disk.leave_pages(0)  # again: an agent whose call failed frees the pages of its WAL
            require_refused(call(runtime, verb, container_id))
            disk.make_room()
        assert call(runtime, "CHECK", "c1", first.document).exit_code == 0
        assert address_of(call(runtime, "ADD", "c2")) != address_of(first)
        disk.leave_pages(0)
        require_refused(call(runtime, "DEL", "c1"))
        disk.make_room()
        assert call(runtime, "DEL", "c1").exit_code == 0
        assert address_of(call(runtime, "ADD", "c3")) == address_of(first)


def test_kubelet_is_refused_while_the_disk_is_full_and_served_when_it_has_room(
    root: Path,
) -> None:
    server = made_server(root)
    with small_disk(pages=512) as disk, Kubelet(server.kubelet) as kubelet:
        paths = msgspec.structs.replace(server, state=disk.directory)
        disk.leave_pages(0)
        node = Node(paths, SHARED)
        try:
            kubelet.wait(lambda: kubelet.allocatable(HCA) == 32)
            with pytest.raises(PodRejected, match="check the disk and its free space"):
                kubelet.admit("refused", [container()])
            assert checkpoint.read(paths).allocations == ()
            disk.make_room()
            kubelet.admit("served", [container()])
            assert len(checkpoint.read(paths).allocations) == 1
            node.plugin.compare()
            assert list(checkpoint.read(paths).offered) == [HCA]
        finally:
            node.plugin.close()
        assert disk.files() == {"devices/checkpoint.json"}
