"""The node's disk, to which containerd has imported the tests' images before the machine starts.

A containerd of this machine imports them in seconds, an emulated one in minutes.
"""

import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import until

MKFS = "/sbin/mkfs.ext4"
SIZE = 8 << 30
"""Of a file that takes only what the node has written."""
IMAGES = Path("var/lib/containerd")
"""On the disk, where node.sh mounts it."""
# Without the kubelet's interface, which requires a network.
_CONFIGURATION = """
version = 3
root = "{root}"
state = "{state}"
disabled_plugins = [
    "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri",
]
[grpc]
address = "{socket}"
"""


def make_disk(path: Path, containerd: Path, images: Iterable[Path]) -> None:
    """Make the disk. `containerd` is its directory of programs, `images` are OCI archives."""
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        content = Path(directory)
        with _importing(containerd, content / IMAGES) as import_image:
            for image in images:
                subprocess.run([*import_image, image], check=True, stdout=subprocess.DEVNULL)
        with path.open("wb") as file:
            file.truncate(SIZE)
        subprocess.run([MKFS, "-q", "-d", content, path], check=True)


@contextmanager
def _importing(programs: Path, root: Path) -> Iterator[list[str]]:
    """The command that imports an archive into a containerd that has its files in `root`."""
    with tempfile.TemporaryDirectory(prefix="podfabric-") as directory:
        run = Path(directory)
        config, socket, log = run / "config.toml", run / "containerd.sock", run / "log"
        config.write_text(_CONFIGURATION.format(root=root, state=run / "state", socket=socket))
        ctr = [str(programs / "ctr"), "--address", str(socket), "--namespace", "k8s.io"]
        command = ["setpriv", "--pdeathsig", "KILL", "--", str(programs / "containerd")]
        with (
            log.open("wb") as output,
            subprocess.Popen(
                [*command, "--config", str(config)], stdout=output, stderr=output
            ) as server,
        ):

            def serves() -> bool:
                assert server.poll() is None, log.read_text()
                answer = subprocess.run([*ctr, "version"], check=False, capture_output=True)
                return answer.returncode == 0

            try:
                until(serves, what=f"containerd; its log is {log}", pause=0.1)
                yield [*ctr, "images", "import"]
            finally:
                server.terminate()
