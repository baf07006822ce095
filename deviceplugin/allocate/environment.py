"""What a container is told in its environment: which HCAs it has, and what NCCL and UCX use.

The kubelet merges the answers of a container's pools and keeps any one of two that have the same
key. So a pool's own keys carry its resource name, and the keys that have but one name,
`NCCL_IB_HCA` and `UCX_NET_DEVICES`, come from one pool of a node.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from deviceplugin.pools.config import PoolConfig
from host.discovery import HCA, RdmaDevice

NCCL = "NCCL_IB_HCA"
UCX = "UCX_NET_DEVICES"


class ContainerHCA(msgspec.Struct, frozen=True, kw_only=True):
    """An HCA that a container gets, with the paths in the container of its nodes there."""

    hca: HCA
    rdma: tuple[RdmaDevice, ...] = ()  # those whose verbs device it gets
    nodes: Mapping[str, str] = {}  # "uverbs", "umad", "issm", "rdma_cm" → path, the first of each
    vfio: Mapping[str, str] = {}  # "mount", "dev-mount" → path


def variable(pool: PoolConfig) -> str:
    """The name of a pool's variable: "intel.com/sriov-a" → "PCIDEVICE_INTEL_COM_SRIOV_A".

    It is the SR-IOV network device plugin's, but for the characters that no shell could refer to
    ("-"), which are "_" here.
    """
    return f"PCIDEVICE_{pool.variable}"


def environment(pool: PoolConfig, given: Sequence[ContainerHCA], *, fabric: bool) -> dict[str, str]:
    """A container's variables, sorted by name.

    With `fabric`, NCCL and UCX are told which HCAs to use: one pool of a node may do so.
    """
    ordered = sorted({one.hca.id: one for one in given}.items())
    key = variable(pool)
    info = {name: _info(one, pool.additional_info) for name, one in ordered}
    variables = {
        key: ",".join(name for name, _ in ordered),
        f"{key}_INFO": msgspec.json.encode(info).decode(),
    }
    devices = [rdma for _, one in ordered for rdma in one.rdma]
    if fabric and devices:
        variables[NCCL] = nccl(devices)
        variables[UCX] = ucx(devices)
    return dict(sorted(variables.items()))


def nccl(devices: Iterable[RdmaDevice]) -> str:
    """NCCL_IB_HCA: "=mlx5_0,mlx5_3". "=": else "mlx5_1" would take mlx5_10, too.

    A port is named where others of its HCA cannot carry traffic: "=mlx5_0:2".
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
    """UCX_NET_DEVICES: "mlx5_0:1,mlx5_3:1". The active ports; of an HCA without any, every port."""
    names: list[str] = []
    for device in devices:
        numbers = [port.number for port in device.ports if port.state == "ACTIVE"]
        numbers = numbers or [port.number for port in device.ports]
        names += [f"{device.name}:{number}" for number in numbers]
    return ",".join(names)


def _info(one: ContainerHCA, additional: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """One HCA's part of …_INFO, as the SR-IOV plugin's code (not its README) has it."""
    hca = one.hca
    info: dict[str, Any] = {}
    # "*" is for every HCA; what is said of one address goes before it.
    extra = {**additional.get("*", {}), **additional.get(hca.id, {})}
    if extra:
        info["extra"] = dict(sorted(extra.items()))
    info["generic"] = {"deviceID": hca.id}
    if one.rdma:
        names = ",".join(rdma.name for rdma in one.rdma)
        info["rdma"] = dict(sorted({**one.nodes, "rdma_dev": names}.items()))
    if one.vfio:
        info["vfio"] = dict(sorted(one.vfio.items()))
    return info
