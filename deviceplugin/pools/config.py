"""What the pools are: /etc/podfabric/config.yaml, or the file of another device plugin as it is.

docs/pools.md has every key. `formats` reads the three forms, all of which come to one Config.
"""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from base import documents
from base.documents import DocumentError

Mode = Literal["all", "exclusive", "shared"]
Placement = Literal["spread", "pack"]
Registration = Literal["legacy", "watcher"]

PARTS = (
    *("agent", "policy", "pools", "devices"),
    *("configList", "periodicUpdateInterval", "resourceList"),
)
"""The top-level keys of config.yaml; the last three are those of other plugins' files."""

ID_BYTES = 70  # of a device in a ListAndWatch answer, at most
LIST_BYTES = 3_670_016  # 3.5 MiB, as gRPC takes no message above 4 MiB
MOST_IDS = LIST_BYTES // ID_BYTES

_FOREIGN = {key.lower() for key in PARTS[4:]}
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_QUOTA = "requests."  # what a ResourceQuota puts before the name, which must stay valid


class Selector(msgspec.Struct, frozen=True, kw_only=True):
    """Which HCAs: every key that is given must match, by any of its values."""

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
    functions: Literal["any", "pci", "auxiliary"] = "any"  # "pci" leaves SFs and software out
    rdma: bool = True  # its devices are HCAs, and their verbs devices are given
    umad: bool = False
    issm: bool = False
    cdi: bool = False
    numa: bool = True  # tell the kubelet the NUMA nodes
    overlap: bool = False  # may offer HCAs that another pool offers
    only_working: bool = False  # leaves HCAs out that never had a working port
    # PFs whose VFs it takes, and HCAs of the host's default route: offered like any other,
    # if a selector names the very HCA, or (PFs with any VF, then) not at all.
    used: Literal["offered", "named", "left"] = "offered"
    additional_info: dict[str, dict[str, str]] = {}  # by address, or "*"

    @property
    def variable(self) -> str:
        """The resource in the name of an environment variable: "RDMA_HCA"."""
        return re.sub(r"[^A-Z0-9_]", "_", self.resource.upper())


class DevicePluginConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All of the device plugin's configuration."""

    pools: tuple[PoolConfig, ...]
    registration: Registration = "legacy"
    rescan: float = 60.0  # seconds between looks at sysfs, beside those that events cause; 0: none


class ConfigError(Exception):
    """A configuration that cannot be used. The text names file and key and says what to do."""


DEFAULT = PoolConfig(resource="rdma/hca", mode="shared", only_working=True)
"""The pool of a node that is not told otherwise: every HCA with a working port."""


def load(
    path: Path, *, prefix: str = "", cdi: bool = False, required: bool = False
) -> DevicePluginConfig:
    """The configuration in that file; the default pool where there is none, unless `required`.

    `prefix` and `cdi` as in `parse`. Raises ConfigError.
    """
    try:
        content = documents.read(path)
    except (FileNotFoundError, NotADirectoryError):
        if required:
            raise ConfigError(f"{path}: there is no such file") from None
        content = b""
    except DocumentError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    return parse(content, str(path), prefix=prefix, cdi=cdi)


def parse(content: bytes, name: str, *, prefix: str = "", cdi: bool = False) -> DevicePluginConfig:
    """The configuration in a file of this content; `name` is for the errors (ConfigError).

    `prefix` is the domain of resources for which another plugin's file gives none, "" for that
    plugin's own; with `cdi` every pool uses CDI, whatever the file says.
    """
    from deviceplugin.pools import formats  # it builds the shapes above

    try:
        config = formats.read(documents.decode(content, name), name, prefix)
    except DocumentError as error:
        raise ConfigError(str(error)) from None
    if cdi:
        pools = tuple(msgspec.structs.replace(pool, cdi=True) for pool in config.pools)
        config = msgspec.structs.replace(config, pools=pools)
    return config


def is_part(key: str) -> bool:
    """Whether config.yaml may have that top-level key. Go, whose files these are, ignores case."""
    return key in PARTS or key.lower() in _FOREIGN


def resource_problem(resource: str) -> str:
    """Why the kubelet would not take an extended resource of that name; "" if it would.

    As IsExtendedResourceName and IsQualifiedName of Kubernetes have it.
    """
    prefix, slash, name = resource.partition("/")
    if not slash or "/" in name:
        return 'write domain/name, such as "rdma/hca"'
    if "kubernetes.io/" in resource:
        return "names of kubernetes.io are Kubernetes' own: take another domain"
    if resource.startswith(_QUOTA):
        return f'a name that begins with "{_QUOTA}" is a quota\'s: take another domain'
    if not _SUBDOMAIN.fullmatch(prefix) or len(_QUOTA + prefix) > 253:
        return (
            f'"{prefix}" is no domain: small letters, digits, "-" and ".", a letter or digit first '
            "and last, 244 at most"
        )
    if not _QUALIFIED.fullmatch(name) or len(name) > 63:
        return (
            f'"{name}" contains invalid characters or too many: letters, digits, "-", "_" and ".", '
            "a letter or digit first and last, 63 at most"
        )
    return ""


def together_problem(pools: Sequence[PoolConfig]) -> str:
    """Why these pools cannot be offered by one node; "" if they can."""
    twice = [name for name, count in Counter(pool.resource for pool in pools).items() if count > 1]
    if twice:
        return f"{twice[0]}: the resource already exists: keep one, or give it another name"
    first: dict[str, str] = {}
    for pool in pools:
        other = first.setdefault(pool.variable, pool.resource)
        if other != pool.resource:
            return (
                f"{other} and {pool.resource}: containers would find both in the variable "
                f"PCIDEVICE_{pool.variable}: give one another name"
            )
    return ""
