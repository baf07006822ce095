"""A container that runc starts with a CDI device: what containerd and CRI-O make of its file.

Source: Container Device Interface, SPEC.md, "OCI Edits"; OCI runtime specification, config.md.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from tests.host.gpu.whole_node import WholeNode
from tests.runtime import CHECKOUT
from tests.standin.driver import CLIENT, Driver

# Its root is the machine's, over which what the container writes lies.
RUN = """
set -eu
mount -t tmpfs tmpfs "$1/room"
mkdir "$1/room/upper" "$1/room/work"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/room/upper,workdir=$1/room/work" "$1/root"
exec runc --root "$1/state" run --bundle "$1" "$2"
"""


class CdiContainer:
    """A container of a pod. Each start of it is a new container of the runtime."""

    def __init__(self, node: WholeNode, pod_uid: str, device: str) -> None:
        self._node = node
        self._pod_uid = pod_uid
        self._file = node.paths.cdi / f"podfabric-slot-{device.partition('=')[2]}.json"
        self._starts = 0
        self.cgroup = ""  # of the last start

    @property
    def edits(self) -> dict[str, Any]:
        """What the file says that the device is."""
        (device,) = json.loads(self._file.read_text())["devices"]
        return dict(device["containerEdits"])

    def start(self, library: str = "libcuda.so.1") -> Driver:
        """A process of a new start, which loads a library; nothing of it runs if hooks fail."""
        self._starts += 1
        name = os.urandom(32).hex()
        bundle = self._node.root / f"bundle-{name[:8]}"
        for directory in ("root", "room", "state"):
            (bundle / directory).mkdir(parents=True)
        self.cgroup = f"/kubepods/burstable/pod{self._pod_uid}/{name}"
        (bundle / "config.json").write_bytes(msgspec.json.encode(self._spec(library)))
        through = [*self._node.inside, "unshare", "--mount", "--propagation", "private"]
        through += ["sh", "-c", RUN, "sh", str(bundle), name]
        return self._node.stack.enter_context(Driver({}, library, through))

    def _spec(self, library: str) -> dict[str, Any]:
        edits = self.edits
        own = str(self._node.root)
        hooks: dict[str, list[dict[str, Any]]] = {}
        for hook in edits.get("hooks", ()):
            rest = {key: value for key, value in hook.items() if key != "hookName"}
            hooks.setdefault(hook["hookName"], []).append(rest)
        nodes = edits.get("deviceNodes", ())
        return {
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": [sys.executable, "-S", "-E", str(CLIENT), library],
                # A driver knows its GPUs; the stand-in is told by a variable.
                "env": [
                    "PATH=/usr/bin:/bin",
                    f"PODFABRIC_STANDIN_GPUS={self._node.driver.file}",
                    *edits.get("env", ()),
                ],
                "cwd": "/",
            },
            "root": {"path": "root"},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
                {"destination": "/run", "type": "tmpfs", "source": "tmpfs"},
                *(
                    {
                        "destination": path,
                        "type": "bind",
                        "source": path,
                        "options": ["rbind", "rprivate"],
                    }
                    for path in (str(CHECKOUT), own)
                ),
                *(
                    {
                        "destination": mount["containerPath"],
                        "type": "bind",
                        "source": mount["hostPath"],
                        "options": mount["options"],
                    }
                    for mount in edits.get("mounts", ())
                ),
            ],
            "hooks": hooks,
            "linux": {
                "cgroupsPath": self.cgroup,
                "namespaces": [{"type": "ipc"}, {"type": "uts"}, {"type": "mount"}],
                "devices": [
                    {key: node[key] for key in ("path", "type", "major", "minor")} for node in nodes
                ],
            },
        }


@contextmanager
def no_cgroups_left(pod_uid: str) -> Iterator[None]:
    """Remove the cgroups of a pod afterwards, as a kubelet does."""
    try:
        yield
    finally:
        for found in Path("/sys/fs/cgroup").glob(f"*/kubepods/burstable/pod{pod_uid}"):
            for directory in (*found.iterdir(), found, found.parent, found.parent.parent):
                if directory.is_dir():
                    with suppress(OSError):  # others use it
                        directory.rmdir()
