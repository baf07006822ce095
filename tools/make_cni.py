"""Leave the plugins as executables in a directory, by this interpreter: they need no agent.

They are for development and tests: PODFABRIC_* of the caller say where the node's files are. The
launcher, which needs an agent, is in build/cni, for `podfabric install`.
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

# Isolated from the caller's PYTHON* variables and working directory (-I), without the site
# machinery (-S): a runtime passes its whole environment on, and start-up is paid on every call.
_SCRIPT = """\
#!{python} {options}
import sys
sys.path[1:1] = {path!r}
from cni.standalone import {executable}
{executable}()
"""


def script(name: str) -> bytes:
    """The executable of a plugin."""
    executable = {"ib-sriov": "sriov"}.get(name, name)
    return _SCRIPT.format(
        python=Path(sys.prefix) / "bin" / "python3",
        options="-I" if MEASURED.exists() else "-IS",  # the site machinery begins to measure
        path=[str(CODE), sysconfig.get_paths()["purelib"]],
        executable=executable if executable in ("ipoib", "rdma", "sriov") else "ipam",
    ).encode()


def main() -> None:
    """Build into the directory that is named first."""
    parser = argparse.ArgumentParser(description="make the CNI executables")
    parser.add_argument("directory", nargs="?", type=Path, default=Path("build/cni/bin"))
    directory: Path = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    for name in EVERY:
        new = directory / f".{name}.{os.getpid()}"  # another process may make them, too
        new.write_bytes(script(name))
        new.chmod(0o755)
        print(new.replace(directory / name))
    print(build_launcher.build())


if __name__ == "__main__":
    main()
