"""Devices of pods on a made-up server: the checkpoints of device plugin and kubelet."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from base.paths import Paths
from base.pod import Pod
from base.types import DeviceId
from deviceplugin import checkpoint
from deviceplugin.api import v1beta1_pb2
from deviceplugin.checkpoint import AllocatedHCA, AllocatedNode, AllocatedRdmaDevice, Allocation
from host.sysfs import pci
from tests import kubelet
from tests.kubelet import checkpoint as of_kubelet
from tests.kubelet.devices import Held, Request

HCA = "rdma/hca"


class Holding:
    """Devices are given to containers as if an Allocate had been answered.

    `registered` are the ids that device plugins offer, by resource, when `write` comes next.
    """

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self.held: list[Held] = []
        self.registered: dict[str, list[str]] = {}
        self.pods: dict[str, kubelet.Pod] = {}
        self._allocations: list[Allocation] = []
        paths.device_plugins.mkdir(parents=True, exist_ok=True)
        of_kubelet.write(self.kubelets_checkpoint, [], {}, "v2")

    def give(
        self,
        pod: Pod,
        ids: Mapping[str, Sequence[str]],
        *,
        container: str = "main",
        resource: str = HCA,
        init: bool = False,
        rails: Mapping[str, int] | None = None,
    ) -> None:
        """The ids, each with the PCI addresses of the HCAs that it stands for.

        One without any is another device plugin's. `rails` has rails by address.
        """
        devices: dict[str, tuple[int, ...]] = dict.fromkeys(ids, ())
        self.held.append(
            Held(
                uid=pod.uid,
                container=container,
                resource=resource,
                devices=devices,
                response=v1beta1_pb2.ContainerAllocateResponse(),
            )
        )
        known_pod = self.pods.setdefault(
            pod.uid, kubelet.Pod(name=pod.name, namespace=pod.namespace, uid=pod.uid, requests=[])
        )
        known_pod.requests.append(Request(name=container, init=init))
        known_pod.requests.sort(key=lambda allocation: not allocation.init)
        self._allocations += [
            Allocation(
                resource=resource,
                id=DeviceId(known),
                devices=tuple(
                    replace(device(self.paths, address), rail=(rails or {}).get(address))
                    for address in addresses
                ),
                time="2026-11-21T19:12:56Z",
                boot_id="this boot",
            )
            for known, addresses in ids.items()
            if addresses
        ]
        self.write()

    def write(self) -> None:
        """Both files, as they would be now."""
        encoded = [checkpoint.encode(allocation) for allocation in self._allocations]
        resources = {allocation.resource for allocation in self._allocations}
        checkpoint.write(self.paths, encoded, {resource: [] for resource in sorted(resources)})
        of_kubelet.write(self.kubelets_checkpoint, self.held, self.registered)

    @property
    def kubelets_checkpoint(self) -> Path:
        """The kubelet's file."""
        return self.paths.device_plugins / "kubelet_internal_checkpoint"


def device(paths: Paths, address: str) -> AllocatedHCA:
    """An HCA, or a software RDMA device by its name, with the numbers that sysfs has now."""
    names = pci.rdma_of(paths, address) if ":" in address or "." in address else (address,)
    numbers = pci.uverbs_numbers(paths)
    rdma = []
    for name in names:
        uverbs, major, minor = numbers[name]
        node = AllocatedNode(f"/dev/infiniband/{uverbs}", major, minor)
        rdma.append(AllocatedRdmaDevice(name=name, uverbs=node, ports=()))
    return AllocatedHCA(
        id=address,
        address=address if address not in names else "",
        netdevs=(),
        rdma=tuple(rdma),
    )
