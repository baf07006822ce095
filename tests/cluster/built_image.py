"""The image as `make image BASE=local` builds it, and its containers under runc, without a
cluster."""

import fcntl
import json
import os
import subprocess
import tarfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.runtime import CHECKOUT
from tests.waiting import until
from tools import image_file

ARCHIVE = CHECKOUT / "build/image/podfabric.tar"
SBOM = CHECKOUT / "build/image/podfabric.cdx.json"
KERNELS = ("/dev", "/proc", "/sys")  # a container gets the host's own


@cache
def built() -> Path:
    """The archive of the image, built from this checkout. Two processes do not build at once."""
    ARCHIVE.parent.mkdir(parents=True, exist_ok=True)
    with (ARCHIVE.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            ["tools/image.sh"],
            cwd=CHECKOUT,
            env={**os.environ, "BASE": "local", "PUSH": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-4000:]
    return ARCHIVE


def configuration() -> dict[str, Any]:
    """The image's configuration: Entrypoint, Env, User."""
    with tarfile.open(built()) as archive:
        digest = image_file.manifest(archive)["config"]["digest"]
        found: dict[str, Any] = json.load(image_file.blob(archive, digest))
    config: dict[str, Any] = found["config"]
    return config


def unpack(directory: Path) -> None:
    """Unpack the image's files, with their owners."""
    with tarfile.open(built()) as archive:
        for layer in image_file.manifest(archive)["layers"]:
            with tarfile.open(fileobj=image_file.blob(archive, layer["digest"])) as files:
                files.extractall(directory, numeric_owner=True)
    directory.chmod(0o755)


@dataclass
class Container:
    """A container of a pod, as a manifest describes it, started by runc without a kubelet.

    Its directories of the host are simulated below `host`, except for the kernel's own. It has the
    network namespace of its starter.
    """

    rootfs: Path
    bundle: Path
    host: Path
    container: Mapping[str, Any]
    volumes: Sequence[Mapping[str, Any]] = ()
    config_map: Mapping[str, str] = field(default_factory=dict)

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run it until it ends, with these arguments in place of its own."""
        with self._made(arguments) as (name, command):
            return subprocess.run(command("run", name), capture_output=True, text=True, check=False)

    @contextmanager
    def running(self, log: Path) -> "Iterator[RunningContainer]":
        """Run it with its own arguments, for the block; its output goes to `log`."""
        with self._made(self.container["args"]) as (name, command), log.open("wb") as output:
            process = subprocess.Popen(command("run", name), stdout=output, stderr=output)
            try:
                yield RunningContainer(process, command, name)
            finally:
                if process.poll() is None:
                    subprocess.run(command("kill", name, "TERM"), check=False, capture_output=True)
                    process.wait(120)

    @contextmanager
    def _made(self, arguments: Sequence[str]) -> Iterator[Any]:
        self.bundle.mkdir(exist_ok=True)
        config = self._config(arguments)
        (self.bundle / "config.json").write_text(json.dumps(config))
        name = f"pf-{uuid.uuid4().hex[:10]}"

        def command(verb: str, *rest: str) -> list[str]:
            words = ["runc", "--root", str(self.bundle / "runc"), verb]
            return [*words, *(["--bundle", str(self.bundle)] if verb == "run" else []), *rest]

        try:
            yield name, command
        finally:
            subprocess.run(command("delete", "--force", name), check=False, capture_output=True)

    def _config(self, arguments: Sequence[str]) -> dict[str, Any]:
        image, context = configuration(), self.container.get("securityContext", {})
        user, group = (int(part) for part in image["User"].split(":"))
        added = [f"CAP_{name}" for name in context.get("capabilities", {}).get("add", [])]
        # A field of the pod replaces a value: the name of its node.
        items = self.container.get("env", [])
        own = [f"{item['name']}={item.get('value', 'this-node')}" for item in items]
        return {
            "ociVersion": "1.0.2",
            "process": {
                "user": {
                    "uid": context.get("runAsUser", user),
                    "gid": context.get("runAsGroup", group),
                },
                "args": [*image["Entrypoint"], *arguments],
                "env": [*image["Env"], *own],
                "cwd": "/",
                "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), added),
                "noNewPrivileges": not context.get("allowPrivilegeEscalation", False),
            },
            "root": {"path": str(self.rootfs), "readonly": True},
            "mounts": [*_RUNTIMES_MOUNTS, *self._mounts()],
            "linux": {
                "namespaces": [{"type": kind} for kind in ("mount", "ipc", "uts", "pid")],
                "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"],
                "readonlyPaths": [f"/proc/{name}" for name in ("bus", "fs", "irq", "sys")],
            },
        }

    def _mounts(self) -> Iterator[dict[str, Any]]:
        sources = {volume["name"]: self._source(volume) for volume in self.volumes}
        for mount in self.container.get("volumeMounts", []):
            propagation = {"HostToContainer": "rslave"}.get(
                mount.get("mountPropagation"), "rprivate"
            )
            yield {
                "destination": mount["mountPath"],
                "type": "bind",
                "source": str(sources[mount["name"]]),
                "options": ["rbind", propagation, "ro" if mount.get("readOnly") else "rw"],
            }

    def _source(self, volume: Mapping[str, Any]) -> Path:
        if "configMap" in volume:
            source = self.host / f"configmap-{volume['name']}"
            source.mkdir(parents=True, exist_ok=True)
            for name, content in self.config_map.items():
                (source / name).write_text(content)
            return source
        path: str = volume["hostPath"]["path"]
        if path in KERNELS:
            return Path(path)
        source = self.host / path.lstrip("/")
        source.mkdir(parents=True, exist_ok=True)
        return source


@dataclass
class RunningContainer:
    """A running container, in which further processes can be started."""

    process: "subprocess.Popen[bytes]"
    command: Any
    name: str

    def exec(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run a command in it."""
        return subprocess.run(
            self.command("exec", self.name, *words), capture_output=True, text=True, check=False
        )

    def wait_for(self, *words: str) -> None:
        """Wait until a command in the container succeeds."""

        def succeeds() -> bool:
            assert self.process.poll() is None, "the container has ended"
            return self.exec(*words).returncode == 0

        until(succeeds, what=f"success of {words}", pause=0.2)


_RUNTIMES_MOUNTS = [
    {"destination": "/proc", "type": "proc", "source": "proc"},
]
