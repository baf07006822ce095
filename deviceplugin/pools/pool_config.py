"""The configuration of pools and its defaults, from any file format (`formats`).

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
PARTS = ("agent", "policy", "ipam", "pools", "gpus", "gpuLimits", *_FOREIGN)
"""The top-level keys of config.yaml. The last three belong to other plugins' files."""


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A pool: one extended resource of the kubelet."""

    resource: str  # "rdma/hca"
    mode: Mode = "shared"
    amount: int = 1  # mode "all": how many containers may hold the pool at a time
    slots: int = 64  # mode "shared": how many containers may hold one HCA at a time
    placement: Placement = "spread"
    selectors: tuple[Selector, ...] = ()  # tried in order; () selects every HCA
    functions: Literal["any", "pci", "auxiliary"] = "any"  # "pci" excludes SFs and software
    rdma: bool = True  # containers get the verbs devices of its HCAs
    umad: bool = False
    issm: bool = False
    cdi: bool = False
    numa: bool = True  # report NUMA nodes to the kubelet
    overlap: bool = False  # may offer HCAs that another pool offers
    only_working: bool = False  # excludes HCAs that never had a working port
    # PFs whose VFs the pool has, and HCAs of the host's default route: "offered" like any HCA, only
    # if "named" by a selector, or "left" out. "left" also leaves out all PFs that have VFs.
    used: Literal["offered", "named", "left"] = "offered"
    additional_info: dict[str, dict[str, str]] = {}  # by address, or "*"

    @property
    def variable(self) -> str:
        """The resource as part of an environment variable's name: "RDMA_HCA"."""
        return re.sub(r"[^A-Z0-9_]", "_", self.resource.upper())


class DevicePluginConfig(msgspec.Struct, frozen=True, kw_only=True):
    pools: tuple[PoolConfig, ...]
    gpus: tuple[GpuPoolConfig, ...] = ()
    gpu_limits: GpuLimitSettings = GpuLimitSettings()
    # Not a key of the file: podfabric leaves the node, and serves only holders of parts of GPUs.
    leaving: bool = False

    @property
    def has_gpu_limits(self) -> bool:
        """Whether containers may have parts of GPUs, which have limits."""
        return any(pool.mode != "replicas" for pool in self.gpus)


class ConfigError(Exception):
    """The configuration cannot be used. The text names file, key and remedy."""


DEFAULT = PoolConfig(resource="rdma/hca", mode="shared", only_working=True)
"""The pool of a node without configuration: every HCA with a working port."""


def is_part(key: str) -> bool:
    """Whether config.yaml may have that top-level key. Keys of Go plugins ignore case."""
    return key in PARTS or key.lower() in map(str.lower, _FOREIGN)


def together_problem(pools: Sequence[PoolConfig], gpus: Sequence[GpuPoolConfig]) -> str | None:
    """The reason if one node cannot offer all of these pools, or `None`."""
    names = [pool.resource for pool in pools] + [name for of in gpus for name in of.resources]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        return f"{twice[0]}: the resource already exists: keep one, or give it another name"
    first: dict[str, str] = {}
    for pool in pools:
        other = first.setdefault(pool.variable, pool.resource)
        if other != pool.resource:
            return (
                f"{other} and {pool.resource}: both would use the environment variable "
                f"PCIDEVICE_{pool.variable}: give one another name"
            )
    return None
