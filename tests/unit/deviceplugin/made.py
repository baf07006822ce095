"""HCAs, pools and allocations as values, for tests that need no /sys."""

from collections.abc import Sequence

from msgspec.structs import replace

from base.types import DeviceId
from deviceplugin.allocate.container_devices import recorded
from deviceplugin.checkpoint import Allocation
from deviceplugin.pools.pool import Pool, Slot
from deviceplugin.pools.pool_config import PoolConfig
from host.sysfs.discovery import HCA, CharacterDevice, Port, RdmaDevice

A, B = "0000:3b:00.0", "0000:5e:00.0"
RESOURCE = "rdma/hca"


def port(number: int = 1, state: str = "ACTIVE", **fields: object) -> Port:
    """A port of an InfiniBand HCA."""
    made = Port(
        number=number,
        link_layer="InfiniBand",
        state=state,
        physical_state="LinkUp" if state == "ACTIVE" else "Polling",
        rate="400 Gb/sec (4X NDR)",
        guid="0002:c903:0000:0001",
        pkeys=(0xFFFF,),
        netdevs=(),
        umad=None,
        issm=None,
    )
    return replace(made, **fields)


def rdma(number: int, *ports: Port) -> RdmaDevice:
    """mlx5_<number> with uverbs<number>."""
    uverbs = CharacterDevice(f"uverbs{number}", 231, 192 + number)
    name = f"mlx5_{number}"
    return RdmaDevice(name=name, uverbs=uverbs, ports=ports or (port(),))


def hca(id: str, *devices: RdmaDevice, **fields: object) -> HCA:
    """An HCA; software if its id is not an address."""
    address = id if ":" in id or "." in id else ""
    made = HCA(
        id=id,
        address=address,
        vendor="15b3",
        device="101e",
        driver="mlx5_core",
        numa=0,
        rdma=devices,
        rdma_names=tuple(device.name for device in devices),
        software=not address,
    )
    return replace(made, **fields)


def pool(hcas: Sequence[HCA], **fields: object) -> Pool:
    """A pool over these HCAs, exclusive by default, with the ids of its mode."""
    config = replace(PoolConfig(resource="rdma/hca", mode="exclusive"), **fields)
    every = tuple(item.id for item in hcas)
    if config.mode == "all":
        slots = [Slot(DeviceId(str(n)), every, ()) for n in range(config.amount)]
    elif config.mode == "exclusive":
        slots = [Slot(DeviceId(reservation), (reservation,), ()) for reservation in every]
    else:
        slots = [
            Slot(DeviceId(f"{reservation}-{n}"), (reservation,), ())
            for reservation in every
            for n in range(config.slots)
        ]
    return Pool(config=config, hcas=tuple(hcas), slots=tuple(slots))


def allocation(of: Pool, device_id: str, *hcas: HCA, resource: str = RESOURCE) -> Allocation:
    """An allocation of these HCAs by a device id of the pool."""
    devices = tuple(recorded(of, hca) for hca in hcas)
    return Allocation(
        resource=resource,
        id=DeviceId(device_id),
        devices=devices,
        time="2026-01-02T03:04:05Z",
        boot_id="b",
    )
