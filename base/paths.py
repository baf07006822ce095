"""Paths of the node's files. Every root can be changed, so that tests run on trees of their own."""

from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path

import msgspec


class Paths(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The root directories, and the paths below them."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")
    host: Path = Path("/")  # the host's root directory: where files are that have paths of the host
    run: Path = Path("/run/podfabric")
    state: Path = Path("/var/lib/podfabric")
    etc: Path = Path("/etc/podfabric")
    kubelet: Path = Path("/var/lib/kubelet")
    cdi: Path = Path("/var/run/cdi")
    devinfo: Path = Path("/var/run/k8s.cni.cncf.io/devinfo")
    cni_conf: Path = Path("/etc/cni/net.d")
    cni_bin: Path = Path("/opt/cni/bin")
    cni_state: Path = Path("/var/lib/cni")  # what other projects' plugins keep

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "Paths":
        """The defaults, except for what PODFABRIC_SYS, PODFABRIC_PROC and so on set."""
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

    @cached_property
    def attachments(self) -> Path:
        """The journal: one file per attachment."""
        return self.state / "attachments"

    @property
    def agent_lock(self) -> Path:
        """Held by the agent that serves. The file stays: an agent has used this directory."""
        return self.state / "agent.lock"

    @cached_property
    def ipam(self) -> Path:
        """The address store and its lock."""
        return self.state / "ipam"

    @cached_property
    def devices(self) -> Path:
        """The device plugin's records, and each pod's choice of HCA."""
        return self.state / "devices"

    @cached_property
    def checkpoint(self) -> Path:
        """The allocation checkpoint (deviceplugin/checkpoint.py)."""
        return self.devices / "checkpoint.json"

    @cached_property
    def shims(self) -> Path:
        """The libraries that containers with a part of a GPU get (cli/setup/shim_files.py)."""
        return self.state / "gpu/shim"

    @cached_property
    def device_plugins(self) -> Path:
        """The directory of the kubelet's and the device plugins' sockets."""
        return self.kubelet / "device-plugins"

    @cached_property
    def pod_resources(self) -> Path:
        """The socket of the kubelet's PodResources API."""
        return self.kubelet / "pod-resources/kubelet.sock"

    @cached_property
    def locks(self) -> Path:
        """Lock files of calls; a boot may remove them."""
        return self.run / "lock"

    @cached_property
    def config(self) -> Path:
        """The administrator's configuration of this node."""
        return self.etc / "config.yaml"

    @cached_property
    def agent_socket(self) -> Path:
        """The socket that launchers connect to."""
        return self.run / "agent.sock"

    @cached_property
    def cluster_policies(self) -> Path:
        """The policies of the cluster, as the agent saw them last (policy/stored_policies.py)."""
        return self.state / "cluster_policies.json"

    def boot_id(self) -> str:
        """The identity of this boot (proc(5)). State of an earlier boot's kernel is void."""
        return boot_id_of(self.proc)


class PathsWithSockets(Paths, frozen=True, kw_only=True, dict=True):
    """The same where the device plugins' sockets are not in the kubelet's root directory."""

    sockets: Path

    @cached_property
    def device_plugins(self) -> Path:
        """The directory of the kubelet's and the device plugins' sockets."""
        return self.sockets


@cache
def boot_id_of(proc: Path) -> str:
    """The identity of the boot, read once: no process outlives a boot."""
    return (proc / "sys/kernel/random/boot_id").read_text().strip()
