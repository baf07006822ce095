"""What the pools are: /etc/podfabric/config.yaml, or the file of another device plugin as it is."""

from typing import Literal

import msgspec

Mode = Literal["all", "exclusive", "shared"]
Placement = Literal["spread", "pack"]


class Selector(msgspec.Struct, frozen=True, kw_only=True):
    """Which adapters: every key that is given must match, by any of its values."""

    vendors: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    drivers: tuple[str, ...] = ()
    pciAddresses: tuple[str, ...] = ()
    pfNames: tuple[str, ...] = ()  # "ens2f0#0-3,5"
    rootDevices: tuple[str, ...] = ()  # "0000:86:00.0#0-3,5"
    ifNames: tuple[str, ...] = ()
    linkTypes: tuple[str, ...] = ()  # "ether", "infiniband"
    pKeys: tuple[str, ...] = ()  # "0x8001": the first in the table
    acpiIndexes: tuple[str, ...] = ()
    auxTypes: tuple[str, ...] = ()  # "sf"
    rdmaDevices: tuple[str, ...] = ()  # "mlx5_0"
    isRdma: bool = False


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One resource of the kubelet's."""

    resource: str  # "rdma/hca"
    mode: Mode = "shared"
    amount: int = 1  # mode "all": how many may hold it at a time
    slots: int = 64  # mode "shared": how many may hold one HCA at a time
    placement: Placement = "spread"
    selectors: tuple[Selector, ...] = ()  # tried in order; none selects every HCA
    rdma: bool = True  # its devices are HCAs, and their verbs devices are given
    umad: bool = False
    issm: bool = False
    cdi: bool = False
    numa: bool = True  # tell the kubelet the NUMA nodes
    overlap: bool = False  # may offer adapters that another pool offers
    only_working: bool = False  # leaves adapters out that never had a working port
    keep_used: bool = True  # PFs with VFs, and those of the host's default route, are left out
    additional_info: dict[str, dict[str, str]] = {}


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All of the device plugin's configuration."""

    pools: tuple[PoolConfig, ...]
    registration: Literal["legacy", "watcher"] = "legacy"
    rescan: float = 60.0  # seconds between looks at sysfs, beside those that events cause


class ConfigError(Exception):
    """A configuration that cannot be used. The text names file and key and says what to do."""
