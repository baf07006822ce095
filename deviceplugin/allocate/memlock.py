"""Raises the limit of locked memory of containers with HCAs, by a hook of the container runtime.

Allocate adds a CDI device, such as "podfabric.io/memlock=unlimited". For a container with this
device, the runtime starts the hook podfabric-memlock (cni/launcher/memlock.c). The kubelet repeats
the answer of Allocate when a container restarts, and a runtime refuses unknown CDI devices. So the
CDI file keeps a device as long as a container with the device may restart.

Sources: Container Device Interface, SPEC.md and pkg/cdi/device.go; containerd,
internal/cri/server/container_create_linux.go and docs/cri/config.md; CRI-O, docs/crio.conf.5.md.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from base import files
from base.paths import Paths
from deviceplugin.allocate import cdi
from deviceplugin.kubelet import records
from deviceplugin.kubelet.records import KubeletUnreadable
from deviceplugin.pools.pool_config import PoolConfig

HOOK = "podfabric-memlock"  # the launcher's name in the runtime's directory of CNI plugins
KIND = f"{cdi.VENDOR}/memlock"  # the kind of a pool has a "-"

_FILE = f"{HOOK}.json"  # not the name of a pool's file, which `cdi.remove_others` may remove

# Below the host's root: of containerd, k3s, RKE2, k0s, MicroK8s, Talos, CRI-O. Drop-in files win.
_DIRECTORIES = (
    "etc/containerd",
    "var/lib/rancher/k3s/agent/etc/containerd",
    "var/lib/rancher/rke2/agent/etc/containerd",
    "etc/k0s",
    "var/snap/microk8s/current/args",
    "etc/cri",
    "etc/crio",
)
_FILES = ("config.toml", "containerd.toml", "crio.conf", "*.d/*.toml", "*.d/*.conf")
_SETTING = re.compile(
    r"^[ \t]*(enable_cdi|cdi_spec_dirs)[ \t]*=[ \t]*(\w+|\[[^]]*\])", re.MULTILINE
)
_TEXT = re.compile(r"""["']([^"']*)["']""")


def problem(paths: Paths) -> str | None:
    """The reason why no container can get the hook; `None` if containers can get it.

    Looks at the host's root directory through process 1, because the agent's container has other
    directories at these paths.
    """
    root = paths.proc / "1/root"
    hook = _hook(paths)
    if not os.access(f"{root}{hook}", os.X_OK):
        return (
            f"the host has no executable {hook}: run `podfabric install`, and set "
            "PODFABRIC_HOST_CNI_BIN of the agent to the directory's path on the host"
        )
    return next(
        filter(None, (_refusal(paths, root, directory) for directory in _DIRECTORIES)), None
    )


def device(paths: Paths, pool: PoolConfig) -> str | None:
    """The CDI name that a container of the pool gets, after its file is written. Raises Unwritten.

    Returns `None` if the pool sets no limit, or there is a `problem`.
    """
    if not pool.memlock or problem(paths) is not None:
        return None
    _write(paths, {pool.memlock, *_described(paths)}, hooked=True)
    return f"{KIND}={pool.memlock}"


def describe(paths: Paths, pools: Iterable[PoolConfig]) -> str | None:
    """Update the file for containers of `pools` and containers that restart. Raises Unwritten.

    Returns the `problem` if a pool sets a limit.
    """
    wanted = {pool.memlock for pool in pools if pool.memlock}
    why = problem(paths)
    _write(paths, _held(paths) | (wanted if why is None else set()), hooked=why is None)
    return why if wanted else None


def retire(paths: Paths) -> None:
    """Write the file without the hook, which will be removed. Raises OSError."""
    if devices := _devices(paths, _held(paths), hooked=False):
        cdi.put(paths.cdi / _FILE, KIND, devices)
    else:
        files.remove(paths.cdi / _FILE)


def _hook(paths: Paths) -> Path:
    return (paths.host_cni_bin or paths.cni_bin) / HOOK


def _refusal(paths: Paths, root: Path, directory: str) -> str | None:
    """The setting in a runtime's configuration with which the runtime finds no CDI file.

    With enable_cdi = false, containerd 2.3 refuses containers with CDI devices, and earlier
    versions ignore the devices. Each runtime refuses devices whose files are in other directories.
    """
    settings: dict[str, str] = {}
    for pattern in _FILES:
        for file in sorted((root / directory).glob(pattern)):
            with suppress(OSError):
                settings |= dict(_SETTING.findall(file.read_text(errors="replace")))
    directories = settings.get("cdi_spec_dirs")
    own = str(paths.cdi).removeprefix("/var")  # /var/run is a link to /run
    if settings.get("enable_cdi") == "false":
        setting = "enable_cdi = false"
    elif directories is not None and own not in {
        name.rstrip("/").removeprefix("/var") for name in _TEXT.findall(directories)
    }:
        setting = f"cdi_spec_dirs without {paths.cdi}"
    else:
        return None
    return f"the container runtime has the setting {setting} in /{directory}: change the setting"


def _held(paths: Paths) -> set[str]:
    """The values of containers that may restart. Without the kubelet's records: all in the file."""
    try:
        rows = records.from_checkpoint(paths, nodes=True)
    except KubeletUnreadable:
        return set(_described(paths))
    return {name.removeprefix(f"{KIND}=") for row in rows for name in row.cdi if is_name(name)}


def is_name(name: str) -> bool:
    """Whether a CDI name is for locked memory, and not for an HCA."""
    return name.startswith(f"{KIND}=")


def _described(paths: Paths) -> Iterator[str]:
    """The values in the file; none if it is unreadable."""
    with suppress(OSError, msgspec.MsgspecError, LookupError, TypeError):
        for listed in msgspec.json.decode((paths.cdi / _FILE).read_bytes())["devices"]:
            yield str(listed["name"])


def _write(paths: Paths, values: Collection[str], *, hooked: bool) -> None:
    cdi.store(paths.cdi / _FILE, KIND, _devices(paths, values, hooked=hooked))


def _devices(paths: Paths, values: Collection[str], *, hooked: bool) -> list[dict[str, Any]]:
    def edits(value: str) -> dict[str, Any]:
        if not hooked:  # a runtime refuses a device without any edit
            return {"env": [f"PODFABRIC_MEMLOCK={value}"]}
        hook = str(_hook(paths))
        return {"hooks": [{"hookName": "createRuntime", "path": hook, "args": [HOOK, value]}]}

    return [{"name": value, "containerEdits": edits(value)} for value in sorted(values)]
