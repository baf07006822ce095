"""Where everything is on this node. Every root can be moved, so that tests run on made-up trees."""

from collections.abc import Mapping
from pathlib import Path

import msgspec


class Paths(msgspec.Struct, frozen=True, kw_only=True):
    """The roots, and what lies below them."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")
    run: Path = Path("/run/podfabric")
    state: Path = Path("/var/lib/podfabric")
    etc: Path = Path("/etc/podfabric")
    kubelet: Path = Path("/var/lib/kubelet")
    cdi: Path = Path("/var/run/cdi")
    devinfo: Path = Path("/var/run/k8s.cni.cncf.io/devinfo")
    cni_conf: Path = Path("/etc/cni/net.d")
    cni_bin: Path = Path("/opt/cni/bin")

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "Paths":
        """The roots that PODFABRIC_SYS, _PROC and so on name, one per field; else the usual."""
        given = {
            field: Path(environ[variable])
            for field in cls.__struct_fields__
            if environ.get(variable := f"PODFABRIC_{field.upper()}")
        }
        return cls(**given)

    @property
    def attachments(self) -> Path:
        """The journal: one file per attachment."""
        return self.state / "attachments"

    @property
    def ipam(self) -> Path:
        """The address store and its lock."""
        return self.state / "ipam"

    @property
    def devices(self) -> Path:
        """What the device plugin has handed out, and what the CNI plugins made of it."""
        return self.state / "devices"

    @property
    def checkpoint(self) -> Path:
        """The allocation checkpoint (deviceplugin/checkpoint.py)."""
        return self.devices / "checkpoint.json"

    @property
    def device_plugins(self) -> Path:
        """Where the kubelet and its device plugins have their sockets."""
        return self.kubelet / "device-plugins"

    @property
    def pod_resources(self) -> Path:
        """The socket of the kubelet's PodResources API."""
        return self.kubelet / "pod-resources/kubelet.sock"

    @property
    def locks(self) -> Path:
        """Locks that need not outlive a boot."""
        return self.run / "lock"

    @property
    def config(self) -> Path:
        """What the administrator sets for this node."""
        return self.etc / "config.yaml"

    @property
    def agent_socket(self) -> Path:
        """Where launchers find the agent."""
        return self.run / "agent.sock"

    def boot_id(self) -> str:
        """This boot's identity (proc(5)): state of another boot's kernel is moot."""
        return (self.proc / "sys/kernel/random/boot_id").read_text().strip()
