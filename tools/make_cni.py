"""Leave the CNI executables in a directory, atomically, one for each plugin.

Each is a script of six lines for this interpreter: isolated from the caller's PYTHON* variables
and working directory (-I), without the site machinery (-S), because a runtime passes its whole
environment on and start-up is paid on every call.
"""

import os
import sys
import sysconfig
from pathlib import Path

EXECUTABLES = {
    "ipoib": "cni.ipoib",
    "podfabric-ipam": "ipam",
}

SCRIPT = """\
#!{python} -IS
# podfabric: the CNI executable "{name}"
import sys
sys.path[1:1] = {path!r}
from {module} import main
main()
"""


def main() -> None:
    """Write the scripts to the directory named first on the command line."""
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "build/cni/bin")
    checkout = Path(__file__).resolve().parent.parent
    path = [str(checkout), sysconfig.get_paths()["purelib"]]
    python = Path(sys.prefix) / "bin" / "python3"
    target.mkdir(parents=True, exist_ok=True)
    for name, module in EXECUTABLES.items():
        temporary = target / f".{name}.{os.getpid()}"
        temporary.write_text(SCRIPT.format(python=python, name=name, path=path, module=module))
        temporary.chmod(0o755)
        temporary.replace(target / name)
        print(target / name)


if __name__ == "__main__":
    main()
