"""Paths of the node's files. Every root can be changed, so that tests run on their own trees."""

from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path

import msgspec


def _path(root: str, below: str) -> "cached_property[Path]":
    """The path `below` the attribute `root` of a Paths."""
    return cached_property(lambda paths: getattr(paths, root) / below)


class Paths(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The root directories, and the paths below them."""

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
    cni_state: Path = Path("/var/lib/cni")  # of other projects' plugins

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "Paths":
        """The defaults, except for the roots that PODFABRIC_SYS, PODFABRIC_PROC and so on set."""
        roots = {
            field: Path(environ[variable])
            for field in cls.__struct_fields__
            if environ.get(variable := f"PODFABRIC_{field.upper()}")
        }
        return cls(**roots)

    @cached_property
    def sysfs(self) -> str:
        """`sys` as text: an ADD reads some 50 attributes, and a Path costs more than the call."""
        return str(self.sys)

    attachments = _path("state", "attachments")  # the journal: one file per attachment
    agent_lock = _path("state", "agent.lock")  # of the agent that serves; the file stays
    ipam = _path("state", "ipam")  # the address store and its lock
    devices = _path("state", "devices")  # the device plugin's records, each pod's choice of HCA
    checkpoint = _path("devices", "checkpoint.json")  # of allocations (deviceplugin/checkpoint.py)
    shims = _path("state", "gpu/shim")  # libraries for parts of GPUs (cli/setup/shim_files.py)
    device_plugins = _path("kubelet", "device-plugins")  # the sockets of kubelet and device plugins
    pod_resources = _path("kubelet", "pod-resources/kubelet.sock")  # the kubelet's PodResources API
    locks = _path("run", "lock")  # lock files of calls; a boot may remove them
    config = _path("etc", "config.yaml")  # the administrator's configuration of this node
    agent_socket = _path("run", "agent.sock")  # for the launchers
    # The last policies of the cluster that the agent read (policy/stored_policies.py).
    cluster_policies = _path("state", "cluster_policies.json")

    def boot_id(self) -> str:
        """The identity of this boot (proc(5))."""
        return boot_id_of(self.proc)


class PathsWithSockets(Paths, frozen=True, kw_only=True, dict=True):
    """Paths whose device plugins' sockets are not in the kubelet's root directory."""

    sockets: Path

    device_plugins = _path("sockets", "")


@cache
def boot_id_of(proc: Path) -> str:
    """The identity of the boot, read once: no process outlives a boot."""
    return (proc / "sys/kernel/random/boot_id").read_text().strip()
