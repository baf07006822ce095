"""The libraries where a container has them: mounted over the driver's, found by no variable."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, chdir
from pathlib import Path

import pytest

from tests.gpu.conftest import MIB, Place
from tests.gpu.group import Libraries
from tests.gpu.programs import program
from tools import build_shim

NOBODY = 65534
TRIPLET = f"{os.uname().machine}-linux-gnu"
# The mounts that a runtime makes for a container, in a mount namespace that ends with the program.
MOUNTS = f"""
set -eu
mount -t overlay overlay -o "lowerdir=/usr/lib,upperdir=$ROOM/upper,workdir=$ROOM/work" /usr/lib
cd /usr/lib/{TRIPLET}
cp "$DRIVER" libcuda.so.615.20.01
ln -sf libcuda.so.615.20.01 libcuda.so.1
ln -sf libcuda.so.1 libcuda.so
mkdir /usr/lib/podfabric
touch /usr/lib/podfabric/libpfcuda-real.so.1
mount --bind libcuda.so.615.20.01 /usr/lib/podfabric/libpfcuda-real.so.1
mount --bind "$SHIM" libcuda.so.615.20.01
mount -t tmpfs tmpfs /run
mkdir -p /run/podfabric/gpu/agent
touch /run/podfabric/gpu/limits /run/podfabric/gpu/region
mount --bind "$GROUP/limits" /run/podfabric/gpu/limits
mount -o remount,bind,ro /run/podfabric/gpu/limits
mount --bind "$GROUP/region" /run/podfabric/gpu/region
mount --bind "$GROUP/agent" /run/podfabric/gpu/agent
cd /
exec "$@"
"""


@pytest.fixture
def here(libraries: Libraries) -> Iterator[Place]:
    """A node and a group in a directory that every user may enter."""
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        stack.enter_context(chdir(path))
        path.chmod(0o755)
        for name in ("upper", "work"):
            (path / name).mkdir()
        yield Place(path, libraries, stack).make()


def contained(here: Place, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command with the mounts; it allocates 1 MiB and ends with its input."""
    here.group.region.chmod(0o666)
    (here.group.directory / "agent/agent.sock").chmod(0o666)
    here.node.state.chmod(0o666)
    variables = {
        "ROOM": str(here.directory),
        "DRIVER": str(here.libraries.plain / "libcuda.so.1"),
        "SHIM": str(build_shim.build()[0]),
        "GROUP": str(here.group.directory),
        "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
    }
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", MOUNTS, "sh", *command],
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("way", ["root", "nobody", "setuid"])
@pytest.mark.parametrize("name", ["libcuda.so.1", "libcuda.so"])
def test_the_mounted_library_is_found_without_any_variable(
    here: Place, way: str, name: str
) -> None:
    route = here.directory / "route"
    shutil.copy(program("route"), route)
    route.chmod(0o4755 if way == "setuid" else 0o755)
    # The stand-in knows its node by a variable; a driver has none.
    clean = ["env", "-i", f"PODFABRIC_STANDIN_GPUS={here.node.file}"]
    user = ["setpriv", f"--reuid={NOBODY}", "--clear-groups"] if way != "root" else []
    done = contained(here, *user, *clean, str(route), "dlopen", name, "2")
    assert (done.returncode, done.stdout) == (0, "ready\n"), done.stderr
    assert len(here.group.registered) == 1
    assert here.group.use().peak_bytes == MIB


def test_the_limits_cannot_be_written_in_the_container(here: Place) -> None:
    done = contained(here, "sh", "-c", "echo > /run/podfabric/gpu/limits")
    assert "Read-only file system" in done.stderr
