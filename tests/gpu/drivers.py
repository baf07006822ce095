"""Stand-ins for the driver that are built otherwise than usual."""

from pathlib import Path

from tests.gpu import group as groups
from tests.standin import build as standin
from tools.compiling import compiled


def not_symbolic() -> Path:
    """The driver, linked so that what it calls by name is found in the shim first."""
    return driver_of(standin.HERE, "not-symbolic.so")


def driver_of(directory: Path, name: str) -> Path:
    """The stand-in for the driver from other sources, linked without -Bsymbolic."""
    parts = [directory / part for part in ("node", "cuda")]
    sources = [str(path) for part in parts for path in sorted(part.glob("*.c"))]
    include = [f"-I{part}" for part in parts]
    command = ["gcc", *standin.FLAGS, "-shared", *include, *sources, "-Wl,-soname,libcuda.so.1"]
    return compiled(command, groups.BUILT / name, directory.rglob("*.[chd]*"))
