"""Executables that stand in for plugins: `noop` follows a script, `delegate` records its calls.

`install_noop` makes the executable in the same way as `tools/make_cni.py` makes ours.
"""

import shutil
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parent.parent

_SCRIPT = """\
#!{python} -IS
import sys
sys.path[1:1] = {path!r}
from cni.spec.entry import main
def load():
    import os
    from tests.plugins.noop import Noop
    return Noop(os.environ)
main(load, "noop: answers what the test says")
"""


def install_noop(directory: Path) -> Path:
    """Write the executable `noop` into `directory`."""
    path = [str(CHECKOUT), sysconfig.get_paths()["purelib"]]
    executable = directory / "noop"
    executable.write_text(_SCRIPT.format(python=Path(sys.prefix) / "bin" / "python3", path=path))
    executable.chmod(0o755)
    return executable


def install_delegate(directory: Path, name: str) -> Path:
    """Write the recording delegate into `directory`, where it also keeps its records.

    It is a copy, because a delegate must belong to root and the checkout may not.
    """
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    executable = directory / name
    shutil.copyfile(HERE / "delegate", executable)
    executable.chmod(0o755)
    return executable
