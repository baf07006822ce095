"""Where everything is on this node. Every root can be moved, so that tests run on made-up trees."""

from collections.abc import Mapping
from pathlib import Path

import msgspec


class Paths(msgspec.Struct, frozen=True, kw_only=True):
    """The roots, and what lies below them."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    run: Path = Path("/run/podfabric")
    state: Path = Path("/var/lib/podfabric")
    etc: Path = Path("/etc/podfabric")

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "Paths":
        """The roots that PODFABRIC_SYS, _PROC, _RUN, _STATE and _ETC name, the usual ones else."""
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
        """The address store, its log and its lock."""
        return self.state / "ipam"

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
