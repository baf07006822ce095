"""Makes a container's environment variables: its HCAs, and the devices for NCCL and UCX.

If two pools set the same variable, the kubelet keeps only one value. So the variables of a pool
contain its resource name, and only one pool of a node sets `NCCL_IB_HCA` and `UCX_NET_DEVICES`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from deviceplugin import rails
from deviceplugin.allocate import device_files
from deviceplugin.pools.pool_config import PoolConfig
from host.device_nodes import DeviceNode
from host.sysfs.discovery import HCA, RdmaDevice

NCCL = "NCCL_IB_HCA"
UCX = "UCX_NET_DEVICES"

Given = Mapping[str, tuple[HCA, Sequence[DeviceNode]]]
"""The HCAs of a container by id, each with the device nodes that the container gets."""


def variable(pool: PoolConfig) -> str:
    """The name of a pool's variable: "intel.com/sriov-a" → "PCIDEVICE_INTEL_COM_SRIOV_A".

    The SR-IOV network device plugin uses the same names, but keeps "-", which shells do not accept.
    """
    return f"PCIDEVICE_{pool.variable}"


def environment(pool: PoolConfig, given: Given) -> dict[str, str]:
    """A container's variables for a pool, sorted by name. The HCAs are in the order of `rails`."""
    ordered = _ordered(pool, given)
    key = variable(pool)
    info = {hca_id: _info(*of, pool.additional_info) for hca_id, of in ordered}
    return {
        key: ",".join(hca_id for hca_id, _ in ordered),
        f"{key}_INFO": msgspec.json.encode(info).decode(),
    }


def of_libraries(pool: PoolConfig, given: Given) -> dict[str, str]:
    """The variables with which NCCL and UCX use the HCAs; {} without a verbs device."""
    devices = [rdma for _, of in _ordered(pool, given) for rdma in _verbs(*of)]
    return {NCCL: nccl(devices), UCX: ucx(devices)} if devices else {}


def nccl(devices: Iterable[RdmaDevice]) -> str:
    """NCCL_IB_HCA: "=mlx5_0,mlx5_3". Without "=", "mlx5_1" would match mlx5_10, too.

    A port is named if other ports of its HCA are not active: "=mlx5_0:2".
    """
    names: list[str] = []
    for device in devices:
        active = [port.number for port in device.ports if port.state == "ACTIVE"]
        if active and len(active) < len(device.ports):
            names += [f"{device.name}:{number}" for number in active]
        else:
            names.append(device.name)
    return "=" + ",".join(names)


def ucx(devices: Iterable[RdmaDevice]) -> str:
    """UCX_NET_DEVICES: "mlx5_0:1,mlx5_3:1". The active ports, or all ports if none is active."""
    names: list[str] = []
    for device in devices:
        numbers = [port.number for port in device.ports if port.state == "ACTIVE"]
        numbers = numbers or [port.number for port in device.ports]
        names += [f"{device.name}:{number}" for number in numbers]
    return ",".join(names)


def _ordered(pool: PoolConfig, given: Given) -> list[tuple[str, tuple[HCA, Sequence[DeviceNode]]]]:
    def place(item: tuple[str, tuple[HCA, Sequence[DeviceNode]]]) -> rails.Place:
        hca = item[1][0]
        return rails.place(hca, rails.number(pool.rails, hca))

    return sorted(given.items(), key=place)


def _verbs(hca: HCA, given: Sequence[DeviceNode]) -> list[RdmaDevice]:
    paths = {node.path for node in given}
    return [
        rdma
        for rdma in hca.rdma
        if rdma.uverbs is not None and device_files.inside(rdma.uverbs.name) in paths
    ]


def _info(
    hca: HCA, given: Sequence[DeviceNode], additional: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """One HCA's part of …_INFO, as in the SR-IOV plugin's code (not its README)."""
    of_rdma: dict[str, str] = {}  # the first of each kind: "uverbs", "umad", "issm", "rdma_cm"
    vfio: dict[str, str] = {}
    for node in given:
        name = node.path.rpartition("/")[2]
        if node.path.startswith("/dev/vfio/"):
            vfio["mount" if name == "vfio" else "dev-mount"] = node.path
        else:
            of_rdma.setdefault(name.rstrip("0123456789"), node.path)
    info: dict[str, Any] = {}
    # "*" is for every HCA; the keys of an address override it.
    extra = {**additional.get("*", {}), **additional.get(hca.id, {})}
    if extra:
        info["extra"] = dict(sorted(extra.items()))
    info["generic"] = {"deviceID": hca.id}
    if verbs := _verbs(hca, given):
        names = ",".join(rdma.name for rdma in verbs)
        info["rdma"] = dict(sorted({**of_rdma, "rdma_dev": names}.items()))
    if vfio:
        info["vfio"] = dict(sorted(vfio.items()))
    return info
