"""Writes configuration files of NCCL and UCX for each container with HCAs.

Allocate makes a directory with the files, and mounts the directory read-only at INSIDE. Allocate
cannot know the P_Key, so each ADD of the pod writes the P_Key of the pod's interfaces. A variable
in the container's environment overrides a line of a file.

The files never have a GID index, because a new interface changes the indexes.

Sources: NCCL, src/misc/param.cc, src/graph/topo.cc, src/transport/net_ib/connect.cc, and its user
guide, "Environment Variables". UCX, src/ucs/config/parser.c and src/uct/ib/base/ib_iface.c.
"""

import hashlib
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from base import files
from base.paths import Paths
from host.selinux import READ, ContainerLabels
from host.sysfs.infiniband import FULL_MEMBER

INSIDE = "/run/podfabric/job"
ENVIRONMENT = {"NCCL_CONF_FILE": f"{INSIDE}/nccl.conf", "UCX_CONFIG_DIR": INSIDE}

_HEADER = "# Written by podfabric. The container's environment overrides each line."
_PKEY = ("NCCL_IB_PKEY", "UCX_IB_PKEY")  # the first parts of the names that ADD writes
_TOPOLOGY = "topology.xml"
# On the host, a virtual machine's real topology: nvidia-topologyd writes it, and NCCL reads it.
_ON_HOST = "1/root/run/nvidia-topologyd/virtualTopology.xml"
_LARGEST = 1 << 20  # bytes of a topology file


class PartitionKey(msgspec.Struct, frozen=True):
    """A P_Key of the ports' tables, and its index if the index is the same on all ports."""

    value: int
    index: int | None


def directory(paths: Paths, resource: str, device_id: str) -> Path:
    """The directory of the container whose first id of the resource is `device_id`."""
    name = hashlib.sha256(f"{resource}\n{device_id}".encode()).hexdigest()[:32]
    return paths.devices / "jobs" / name


def make(
    paths: Paths, resource: str, ids: Collection[str], hcas: Mapping[str, str], tc: int | None
) -> Path:
    """Write the files for a container with these ids of the resource. Raises OSError.

    `hcas` has NCCL_IB_HCA and UCX_NET_DEVICES. `tc` is the traffic class of the packets, if set.
    Returns the directory to mount.
    """
    first, *others = sorted(ids)
    _remove(directory(paths, resource, other) for other in others)  # of former containers
    place = directory(paths, resource, first)
    lines = dict(hcas)
    if tc is not None:
        lines |= dict.fromkeys(("NCCL_IB_TC", "UCX_IB_TRAFFIC_CLASS"), str(tc))
    topology = _topology(paths)
    if topology:
        lines["NCCL_TOPO_FILE"] = f"{INSIDE}/{_TOPOLOGY}"
    _write(place / "nccl.conf", _of("NCCL_", lines))
    _write(place / "ucx.conf", _of("UCX_", lines))
    if topology:
        files.write_atomically(place / _TOPOLOGY, topology, 0o644, durable=False)
    else:
        files.remove(place / _TOPOLOGY, durable=False)
    place.chmod(0o755)  # a container with any user reads the files
    labels = ContainerLabels(paths.sys)
    for path in (place, *place.iterdir()):
        labels.set(path, READ)
    return place


def set_pkey(paths: Paths, ids: Iterable[tuple[str, str]], pkey: PartitionKey | None) -> None:
    """Write the P_Key into the files of a pod, or remove it. Raises OSError.

    `ids` are the pod's (resource, id). A container that got no files gets none.
    """
    lines: dict[str, str] = {}
    if pkey is not None:
        lines["NCCL_IB_PKEY_VALUE"] = f"{pkey.value:#06x}"  # since NCCL 2.31
        if pkey.index is not None:
            lines["NCCL_IB_PKEY"] = str(pkey.index)
        lines["UCX_IB_PKEY"] = f"{pkey.value & ~FULL_MEMBER:#06x}"
    labels = ContainerLabels(paths.sys)
    for place in dict.fromkeys(directory(paths, *of) for of in ids):
        for name, prefix in (("nccl.conf", "NCCL_"), ("ucx.conf", "UCX_")):
            file = place / name
            with suppress(FileNotFoundError):
                old = file.read_text(errors="replace").splitlines()
                kept = [line for line in old if not line.startswith((*_PKEY, "#"))]
                new = [*kept, *_of(prefix, lines)]
                if [_HEADER, *new] != old:
                    _write(file, new)
                    labels.set(file, READ)


def remove_stale(paths: Paths, keys: Callable[[], Collection[tuple[str, str]]]) -> None:
    """Remove the directories of every (resource, id) that is not in `keys`. Raises OSError.

    Lists the directories before it calls `keys`, so that a new directory stays.
    """
    listed = sorted((paths.devices / "jobs").glob("*"))
    kept = {directory(paths, *key) for key in keys()} if listed else set()
    _remove(place for place in listed if place not in kept)


def _topology(paths: Paths) -> bytes:
    """The topology file of the node; b"" if there is none or it is too large."""
    try:
        with (paths.proc / _ON_HOST).open("rb") as file:
            content = file.read(_LARGEST + 1)
    except OSError:
        return b""
    return content if len(content) <= _LARGEST else b""


def _of(prefix: str, lines: Mapping[str, str]) -> Iterator[str]:
    return (f"{name}={value}" for name, value in lines.items() if name.startswith(prefix))


def _write(file: Path, lines: Iterable[str]) -> None:
    content = "\n".join((_HEADER, *lines, ""))
    files.write_atomically(file, content.encode(), 0o644, durable=False)


def _remove(places: Iterable[Path]) -> None:
    for place in places:
        with suppress(FileNotFoundError):
            shutil.rmtree(place)
