"""A made-up server whose GPUs containers hold parts of: its checkpoint, its groups, its kubelet."""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from base.paths import Paths
from base.types import DeviceId
from deviceplugin import checkpoint
from deviceplugin.checkpoint import AllocatedGPU, Allocation
from gpu.limits import layout
from gpu.limits.groups import Groups
from gpu.limits.limits_file import Limit
from tests.unit.gpu.driver import Driver
from tests.unit.gpu.groups import PlainRegions
from tests.unit.gpu.test_driver_files import install
from tests.unit.host import servers

GIB = 1 << 30
SLICE = "podfabric.io/gpu-10g-25"
SLICES = f"""
gpus:
  - shapes: [{{name: {SLICE}, memory: 10Gi, compute: 25}}]
    memory: 80Gi
    reserve: 0
"""
POD_UID = "2f1c6d1e-0000-4000-8000-000000000001"


class GpuServer:
    """The server `servers.dgx`, with the nodes of its eight GPUs."""

    def __init__(self, paths: Paths, config: str = SLICES) -> None:
        self.paths = paths
        self.driver = Driver(paths)
        self.driver.nodes(range(8))
        self.groups = Groups(paths.run / "gpu", regions=PlainRegions())
        self._allocations: list[Allocation] = []
        self._entries: list[dict[str, object]] = []
        self._registered: dict[str, list[str]] = {}
        install(paths.host)
        paths.shims.mkdir(parents=True)
        for name in ("libpfcuda.so", "libpfnvml.so"):
            (paths.shims / name).touch()
        paths.etc.mkdir(exist_ok=True)
        paths.config.write_text(config)
        boot_id = paths.proc / "sys/kernel/random/boot_id"
        boot_id.parent.mkdir(parents=True, exist_ok=True)
        boot_id.write_text("a-boot\n")

    def hold(
        self,
        number: int,
        ids: Sequence[str],
        *,
        resource: str = SLICE,
        limited: bool = True,
        address: str = "",
        **recorded: object,
    ) -> str:
        """A container holds slices of GPU `number`; its group, which has limits if `limited`."""
        uuid = servers.gpu_uuid(number)
        group = f"group-{ids[0]}"
        of_one = AllocatedGPU(
            uuid=uuid,
            bdf=address or servers.DGX_GPUS[number],
            minor=number,
            memory_bytes=10 * GIB,
            compute_share=0.25,
            slot=ids[0],
            group=group,
        )
        self._record(resource, ids, replace(of_one, **recorded))
        if limited:
            count = len(ids)
            self.groups.make(group, Limit(uuid, count * 10 * GIB, count * 0.25))
        return group

    def using(self, group: str, **of_gpu: int) -> None:
        """Write into the group's region what its processes would."""
        with (self.groups.root / group / "region").open("r+b") as region:
            region.seek(layout.USE_AT)
            region.write(bytes(layout.PfGpu(**of_gpu)))

    def hold_whole(self, number: int, resource: str, ids: Sequence[str]) -> None:
        """A container holds replicas of a GPU, of which nothing is limited."""
        uuid, address = servers.gpu_uuid(number), servers.DGX_GPUS[number]
        self._record(resource, ids, AllocatedGPU(uuid=uuid, bdf=address, minor=number))

    def registered(self, resource: str, ids: Sequence[str]) -> None:
        """Another device plugin has offered these ids."""
        self._registered[resource] = list(ids)
        self._write_kubelets()

    def _record(self, resource: str, ids: Sequence[str], gpu: AllocatedGPU) -> None:
        self._allocations += [
            Allocation(
                resource=resource,
                id=DeviceId(name),
                devices=(),
                time="2026-11-21T19:12:56Z",
                boot_id="a-boot",
                gpu=gpu,
            )
            for name in ids
        ]
        checkpoint.write(self.paths, [checkpoint.encode(each) for each in self._allocations])
        self.held_by_other(resource, ids)

    def held_by_other(self, resource: str, ids: Sequence[str]) -> None:
        """A container holds ids, by the kubelet's record alone."""
        entry: dict[str, object] = {
            "PodUID": POD_UID,
            "ContainerName": f"container-{len(self._entries)}",
            "ResourceName": resource,
            "DeviceIDs": {"-1": list(ids)},
        }
        self._entries.append(entry)
        self._write_kubelets()

    def _write_kubelets(self) -> None:
        file = self.paths.device_plugins / "kubelet_internal_checkpoint"
        file.parent.mkdir(parents=True, exist_ok=True)
        data = {"PodDeviceEntries": self._entries, "RegisteredDevices": self._registered}
        file.write_bytes(msgspec.json.encode({"Data": data, "Checksum": 0}))
