"""Write the plugins as executables of this interpreter into a directory. They need no agent.

They are for development and tests; the caller's PODFABRIC_* variables name the node's files.
`podfabric install` uses the launcher in build/cni, which needs an agent.
"""

import argparse
import os
import sys
import sysconfig
from pathlib import Path

from cli.setup.executables import CODE, EVERY
from tools import build_launcher

MEASURED = Path(sysconfig.get_paths()["purelib"]) / "a0_measured.pth"
"""While it is there, each process of the virtual environment measures what it covers."""

STANDALONE = ("ipoib", "ipvlan", "macvlan", "rdma", "sriov")  # functions of cni.standalone

# Isolated from the caller's PYTHON* variables and working directory (-I), because a runtime passes
# its whole environment on. Without the site machinery (-S), because every call pays for the start.
_SCRIPT = """\
#!{python} {options}
import sys
sys.path[1:1] = {path!r}
from cni.standalone import {executable}
{executable}()
"""


def script(name: str) -> bytes:
    """The executable of a plugin."""
    executable = {"ib-sriov": "sriov"}.get(name, name.removeprefix("podfabric-"))
    return _SCRIPT.format(
        python=Path(sys.prefix) / "bin" / "python3",
        options="-I" if MEASURED.exists() else "-IS",  # the site machinery starts the measurement
        path=[str(CODE), sysconfig.get_paths()["purelib"]],
        executable=executable if executable in STANDALONE else "ipam",
    ).encode()


def main() -> None:
    """Build into the directory that the first argument names."""
    parser = argparse.ArgumentParser(description="make the CNI executables")
    parser.add_argument("directory", nargs="?", type=Path, default=Path("build/cni/bin"))
    directory: Path = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    for name in EVERY:
        new = directory / f".{name}.{os.getpid()}"  # another process may make them too
        new.write_bytes(script(name))
        new.chmod(0o755)
        print(new.replace(directory / name))
    print(build_launcher.build())


if __name__ == "__main__":
    main()
