"""The hook podfabric-memlock with the rights of a runtime: it raises hard limits."""

import json
import resource
import shutil
import subprocess
from pathlib import Path

import pytest

from deviceplugin.allocate.memlock import HOOK
from tools import build_launcher

NONE, MIB = resource.RLIM_INFINITY, 1 << 20
ANYBODY = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "--bounding-set=-all"]


@pytest.mark.parametrize("user", [[], ANYBODY], ids=["root", "1000"])
@pytest.mark.parametrize(
    ("value", "before", "after"),
    [
        ("unlimited", (MIB, MIB), (NONE, NONE)),
        (str(64 << 30), (MIB, 2 * MIB), (64 << 30, 64 << 30)),
        (str(MIB), (4096, 2 * MIB), (MIB, 2 * MIB)),
        (str(MIB), (NONE, NONE), (NONE, NONE)),
    ],
)
def test_limits_of_any_process_are_raised(
    tmp_path: Path, user: list[str], value: str, before: tuple[int, int], after: tuple[int, int]
) -> None:
    hook = shutil.copy(build_launcher.build(), tmp_path / HOOK)
    with subprocess.Popen([*user, "sleep", "600"]) as process:
        resource.prlimit(process.pid, resource.RLIMIT_MEMLOCK, before)
        state = json.dumps({"ociVersion": "1.2.0", "status": "creating", "pid": process.pid})
        done = subprocess.run([hook, value], input=state.encode(), capture_output=True, check=False)
        found = resource.prlimit(process.pid, resource.RLIMIT_MEMLOCK)
        process.kill()
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert found == after
