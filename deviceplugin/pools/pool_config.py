"""The types and defaults of the configuration of pools, for all file formats (`formats`).

docs/use/devices.md describes every key.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from gpu.gpu_pool import GpuLimitSettings, GpuPoolConfig
from host.sysfs.selectors import Selector

Mode = Literal["all", "exclusive", "shared"]
Placement = Literal["spread", "pack"]

_FOREIGN = ("configList", "periodicUpdateInterval", "resourceList")
PARTS = ("agent", "policy", "ipam", "pools", "rails", "gpus", "gpuLimits", *_FOREIGN)
"""The top-level keys of config.yaml. The keys in `_FOREIGN` are from other plugins' files."""


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A pool: one extended resource of the kubelet."""

    resource: str  # "rdma/hca"
    mode: Mode = "shared"
    amount: int = 1  # mode "all": most containers that hold the pool at a time
    slots: int = 64  # mode "shared": most containers that hold one HCA at a time
    placement: Placement = "spread"
    selectors: tuple[Selector, ...] = ()  # tried in order; () selects every HCA
    functions: Literal["any", "pci", "auxiliary"] = "any"  # "pci" excludes SFs and software HCAs
    rdma: bool = True  # containers get the verbs devices of the HCAs
    umad: bool = False
    issm: bool = False
    cdi: bool = False
    memlock: str = "unlimited"  # of containers, RLIMIT_MEMLOCK; or bytes, "68719476736"; "": as is
    traffic_class: int | None = None  # of the container's RDMA packets; `None`: the library's
    numa: bool = True  # report NUMA nodes to the kubelet
    overlap: bool = False  # may offer HCAs that another pool offers
    only_working: bool = False  # excludes HCAs that never had a working port
    # For PFs whose VFs the pool has, and for HCAs of the host's default route. "offered": like any
    # HCA. "named": only if a selector names the HCA. "left": never, and no PF that has VFs either.
    used: Literal["offered", "named", "left"] = "offered"
    additional_info: dict[str, dict[str, str]] = {}  # by address, or "*"
    rails: tuple[Selector, ...] = ()  # of the file: entry n selects the HCAs of rail n

    @property
    def variable(self) -> str:
        """The resource as part of an environment variable's name: "RDMA_HCA"."""
        return re.sub(r"[^A-Z0-9_]", "_", self.resource.upper())


class DevicePluginConfig(msgspec.Struct, frozen=True, kw_only=True):
    pools: tuple[PoolConfig, ...]
    gpus: tuple[GpuPoolConfig, ...] = ()
    gpu_limits: GpuLimitSettings = GpuLimitSettings()
    # Not a key of the file. True: podfabric leaves the node and accepts no new containers.
    leaving: bool = False

    @property
    def has_gpu_limits(self) -> bool:
        """Whether a pool offers parts of GPUs with limits."""
        return any(pool.mode != "replicas" for pool in self.gpus)


class ConfigError(Exception):
    """The configuration cannot be used. The text names file, key and remedy."""


DEFAULT = PoolConfig(resource="rdma/hca", mode="shared", only_working=True)
"""The pool of a node without configuration: every HCA with a working port."""


def is_part(key: str) -> bool:
    """Whether config.yaml may have the top-level key. Keys of Go plugins may have any case."""
    return key in PARTS or key.lower() in map(str.lower, _FOREIGN)


def together_problem(pools: Sequence[PoolConfig], gpus: Sequence[GpuPoolConfig]) -> str | None:
    """The reason why one node cannot offer all of these pools; `None` if it can."""
    names = [pool.resource for pool in pools] + [name for of in gpus for name in of.resources]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        return f"{twice[0]}: two pools have this resource: remove one pool, or rename its resource"
    first: dict[str, str] = {}
    for pool in pools:
        other = first.setdefault(pool.variable, pool.resource)
        if other != pool.resource:
            return (
                f"{other} and {pool.resource}: both would use the environment variable "
                f"PCIDEVICE_{pool.variable}: rename one resource"
            )
    return None
