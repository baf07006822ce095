"""A node with pools: a stand-in for the kubelet, the device plugin and both CNI plugins."""

import functools
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from base import decoding
from base.paths import Paths
from deviceplugin import checkpoint
from deviceplugin.ledger import Ledger
from deviceplugin.plugin import DevicePlugin
from deviceplugin.pools.pool_config import DevicePluginConfig, PoolConfig
from host.sysfs import pci
from tests.kernel.pods import IP, Node, Reply, SriovNode, run
from tests.kubelet import Kubelet, Pod


class PoolNode:
    """The pools of this machine. The directory of the files has a short path, for sockets."""

    def __init__(self, root: Path, *pools: PoolConfig) -> None:
        self.paths = Paths(
            run=root / "run",
            state=root / "state",
            etc=root / "etc",
            kubelet=root / "k",
            cdi=root / "cdi",
            devinfo=root / "devinfo",
        )
        self.ipoib, self.sriov = Node(root), SriovNode(root)
        self.ipoib.defaults = {"master": "auto"}  # type: ignore[misc]
        for plugin in (self.ipoib, self.sriov):
            plugin.paths = self.paths
        decoding.build_decoders()
        self.kubelet = Kubelet(self.paths.kubelet)
        self.config = DevicePluginConfig(pools=pools)
        self.plugin = DevicePlugin(self.paths, self.config)

    def restart(self) -> None:
        """Restart the device plugin; pods stay."""
        self.plugin.close()
        self.plugin = DevicePlugin(self.paths, self.config)
        self.plugin.start()

    def admit(self, name: str, resource: str, count: int = 1) -> Pod:
        """A pod with one container, which gets that many devices."""
        return self.kubelet.admit(name, [{"name": "main", "limits": {resource: count}}])

    def add(self, plugin: Node, pod: Pod, **config: Any) -> Reply:  # noqa: ANN401
        """An ADD for a pod, as a runtime of Kubernetes calls it; its namespace has its name."""
        return plugin.add(pod.uid, pod.name, args=arguments(pod), **config)

    def refused(self, plugin: Node, pod: Pod, **config: Any) -> Reply:  # noqa: ANN401
        """An ADD that must fail."""
        reply = plugin.call("ADD", pod.uid, pod.name, args=arguments(pod), **config)
        assert reply.exit_code == 1, reply.document
        return reply

    def delete(self, plugin: Node, pod: Pod, **config: Any) -> None:  # noqa: ANN401
        """A DEL that must succeed."""
        plugin.delete(pod.uid, pod.name, args=arguments(pod), **config)

    def listed(self, resource: str) -> Mapping[str, bool]:
        """Every device id that the kubelet knows, and its health."""
        return {
            device_id: healthy for device_id, (healthy, _) in self.kubelet.devices(resource).items()
        }

    def await_healthy(self, resource: str, number: int) -> None:
        """Wait until that many devices can be allocated."""
        self.kubelet.wait(lambda: self.kubelet.allocatable(resource) == number)

    def held(self) -> list[tuple[str, str]]:
        """The allocations in the checkpoint."""
        return [allocation.key for allocation in checkpoint.read(self.paths).allocations]

    def forget_young_too(self) -> None:
        """Compare with the kubelet now, including new allocations.

        The kubelet forgets a pod only at the next allocation.
        """
        of_any_age = functools.partialmethod(Ledger.drop_unknown, age=-1.0)
        with mock.patch.object(Ledger, "drop_unknown", of_any_age):
            self.plugin.compare()


@contextmanager
def pool_node(*pools: PoolConfig) -> Iterator[PoolNode]:
    """A running kubelet and device plugin."""
    with tempfile.TemporaryDirectory(prefix="pf-") as root:
        node = PoolNode(Path(root), *pools)
        with node.kubelet:
            node.plugin.start()
            try:
                yield node
            finally:
                node.plugin.close()


def arguments(pod: Pod) -> str:
    """CNI_ARGS, as a container runtime sets them."""
    return (
        f"IgnoreUnknown=1;K8S_POD_NAMESPACE={pod.namespace};K8S_POD_NAME={pod.name};"
        f"K8S_POD_UID={pod.uid};K8S_POD_INFRA_CONTAINER_ID={pod.uid}"
    )


def uverbs_numbers(pod: Pod) -> list[str]:
    """The numbers of the uverbs nodes that a pod's containers were given: "231:192", sorted.

    They are read from the nodes, as a runtime reads them when it makes the container.
    """
    hosts = {
        host
        for container in pod.containers.values()
        for path, (host, _) in container.devices.items()
        if "uverbs" in path
    }
    numbers = (Path(host).stat().st_rdev for host in hosts)
    return sorted(f"{os.major(number)}:{os.minor(number)}" for number in numbers)


def beside(netns: str, interface: str = "net1") -> list[str]:
    """The numbers of the uverbs devices on the device of an interface, seen from inside the pod.

    `ip netns exec` mounts a sysfs of the pod's namespace.
    """
    return _inside(netns, f"cat /sys/class/net/{interface}/device/infiniband_verbs/*/dev")


def number_of(rdma: str) -> str:
    """The number of an RDMA device's uverbs device, as the host has it now."""
    _, major, minor = pci.uverbs_numbers(Paths())[rdma]
    return f"{major}:{minor}"


def fabric_beside(netns: str, interface: str = "net1") -> list[str]:
    """The same for an IPoIB child, which has no device in sysfs.

    Its address contains the GUID of its HCA's port.
    """
    return [number for number, mac, _, gid in _verbs(netns, interface) if mac[-16:] == gid[-16:]]


def _verbs(netns: str, interface: str) -> list[list[str]]:
    """For each uverbs device that a pod sees: number, address of that interface, node GUID, GID."""
    command = (
        f"mac=$(cat /sys/class/net/{interface}/address); "
        "for verbs in /sys/class/infiniband_verbs/uverbs*; do "
        "rdma=/sys/class/infiniband/$(cat $verbs/ibdev); "
        "echo $(cat $verbs/dev) $mac $(cat $rdma/node_guid) $(cat $rdma/ports/1/gids/0); done"
    )
    lines = (line.split() for line in _inside(netns, command))
    return [[number, *(text.replace(":", "") for text in rest)] for number, *rest in lines]


def _eui64(mac: str) -> str:
    digits = bytes.fromhex(mac)
    return (bytes([digits[0] ^ 2]) + digits[1:3] + b"\xff\xfe" + digits[3:]).hex()


def _inside(netns: str, command: str) -> list[str]:
    return sorted(run(IP, "netns", "exec", netns, "/bin/sh", "-c", command).splitlines())
