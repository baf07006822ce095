"""Executables that stand in for plugins: `noop` behaves as scripted, `delegate` writes down calls.

`install` puts `noop` into a directory as `tools/make_cni.py` puts ours.
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
main(load, "noop: answers what it is told")
"""


def install_noop(directory: Path) -> Path:
    """Write the executable `noop` into `directory`."""
    path = [str(CHECKOUT), sysconfig.get_paths()["purelib"]]
    executable = directory / "noop"
    executable.write_text(_SCRIPT.format(python=Path(sys.prefix) / "bin" / "python3", path=path))
    executable.chmod(0o755)
    return executable


def install_delegate(directory: Path, name: str) -> Path:
    """Write the recording delegate into `directory`, where it keeps what it records, too.

    A copy, since only what root owns is started, and the checkout may be anybody's.
    """
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    executable = directory / name
    shutil.copyfile(HERE / "delegate", executable)
    executable.chmod(0o755)
    return executable
