"""Paths of the node's files. Tests set other root directories."""

from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path

import msgspec


def _path(root: str, below: str) -> "cached_property[Path]":
    """A property: the attribute `root`, joined with the path `below`."""
    return cached_property(lambda paths: getattr(paths, root) / below)


class Paths(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The root directories, and the paths of files below them."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")
    host: Path = Path("/")  # the host's root directory
    run: Path = Path("/run/podfabric")
    state: Path = Path("/var/lib/podfabric")
    etc: Path = Path("/etc/podfabric")
    kubelet: Path = Path("/var/lib/kubelet")
    cdi: Path = Path("/var/run/cdi")
    devinfo: Path = Path("/var/run/k8s.cni.cncf.io/devinfo")
    cni_conf: Path = Path("/etc/cni/net.d")
    cni_bin: Path = Path("/opt/cni/bin")
    host_cni_bin: Path | None = None  # the host's path of `cni_bin`; `None`: the same
    cni_state: Path = Path("/var/lib/cni")  # state of other projects' plugins

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "Paths":
        """The default roots, or the directories in PODFABRIC_SYS, PODFABRIC_PROC and so on."""
        roots = {
            field: Path(environ[variable])
            for field in cls.__struct_fields__
            if environ.get(variable := f"PODFABRIC_{field.upper()}")
        }
        return cls(**roots)

    @cached_property
    def sysfs(self) -> str:
        """`sys` as text, because making a Path takes longer than reading an attribute of sysfs."""
        return str(self.sys)

    attachments = _path("state", "attachments")  # the journal: one file per attachment
    agent_lock = _path("state", "agent.lock")  # the lock of the agent that serves; the file stays
    ipam = _path("state", "ipam")  # the address store and its lock
    devices = _path("state", "devices")  # the device plugin's records, and each pod's HCA
    checkpoint = _path("devices", "checkpoint.json")  # of allocations (deviceplugin/checkpoint.py)
    shims = _path("state", "gpu/shim")  # libraries for parts of GPUs (cli/setup/shim_files.py)
    device_plugins = _path("kubelet", "device-plugins")  # sockets of kubelet and device plugins
    pod_resources = _path("kubelet", "pod-resources/kubelet.sock")  # the kubelet's PodResources API
    locks = _path("run", "lock")  # lock files of calls; they need not survive a boot
    config = _path("etc", "config.yaml")  # the administrator's configuration of this node
    agent_socket = _path("run", "agent.sock")  # for the launchers
    # The last policies of the cluster that the agent read (policy/stored_policies.py).
    cluster_policies = _path("state", "cluster_policies.json")

    def boot_id(self) -> str:
        """The identity of this boot (proc(5))."""
        return boot_id_of(self.proc)


class PathsWithSockets(Paths, frozen=True, kw_only=True, dict=True):
    """Paths with another directory, `sockets`, for the sockets of device plugins."""

    sockets: Path

    device_plugins = _path("sockets", "")


@cache
def boot_id_of(proc: Path) -> str:
    return (proc / "sys/kernel/random/boot_id").read_text().strip()
