"""Images of the tests' pods, as OCI archives: one static executable, and its links.

The image for GPUs also has a C library and a program that uses CUDA, but no driver. The image for
verbs has libibverbs, and a program that uses it. The image for jobs is Debian with MPI and sshd.

No registry is needed: `node` imports them into containerd, under the names that pods use.
"""

import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

from tests.cluster import programs
from tests.kernel import verbs
from tools.compiling import CHECKOUT, compiled

BUSYBOX = Path("/bin/busybox")
WORKLOAD = "test.podfabric/workload:1"
"""busybox, for the containers of test pods and for their sandboxes."""
OF_EXAMPLES = "docker.io/library/busybox:1.37"
"""The image that the examples name, which cannot be pulled here."""
OF_ALNAIR = "docker.io/hxhp/elastic-horovod-demo:1.0"
"""The image that Alnair's pod names, which cannot be pulled here: gpu_program.c as its python."""

VERBS = "test.podfabric/verbs:1"
"""hold_objects.c with libibverbs and the driver of Soft-RoCE, beside busybox."""

JOBS = "test.podfabric/jobs:1"
"""Debian 12 with programs of jobs, hold_objects.c, mpi_program.c, and a user with uid 1000."""

HERE = Path(__file__).parent
LIBRARIES = Path(f"/usr/lib/{os.uname().machine}-linux-gnu")
LOADERS = ("lib64/ld-linux-x86-64.so.2", "lib/ld-linux-aarch64.so.1")
C_LIBRARY = ("libc.so.6", "libdl.so.2", "libpthread.so.0")


def write_workload(path: Path, name: str = WORKLOAD) -> None:
    """Write the archive of `WORKLOAD`, whose command sleeps until SIGTERM."""
    command = ["/bin/sh", "-c", "trap exit TERM INT; while :; do sleep 3600 & wait $!; done"]
    _write_archive(path, name, _layer(BUSYBOX), command, ["PATH=/bin"])


def write_for_gpus(path: Path) -> None:
    """Write the archive of `OF_ALNAIR`. It has the variables of NVIDIA's CUDA images."""
    program = CHECKOUT / "tests/cluster/gpu_program.c"
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror"]
    built = CHECKOUT / "build/gpu/programs/gpu_program"
    sources = [program, CHECKOUT / "tests/gpu/programs/driver.h"]
    compiled(["gcc", *flags, str(program), "-ldl"], built, sources)
    files = {"usr/bin/python": built}
    files |= {loader: Path("/", loader) for loader in LOADERS if Path("/", loader).exists()}
    files |= {str(LIBRARIES / name)[1:]: LIBRARIES / name for name in C_LIBRARY}
    layer = _layer(BUSYBOX, {name: file.read_bytes() for name, file in files.items()})
    where = "LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64"
    _write_archive(path, OF_ALNAIR, layer, ["/bin/sh"], ["PATH=/usr/bin:/bin", where])


def write_for_verbs(path: Path) -> None:
    """Write the archive of `VERBS`, whose command makes queue pairs: DEVICE NUMBER."""
    driver, configuration = next(LIBRARIES.glob("libibverbs/librxe-*.so")), Path(verbs.DRIVER)
    shown = subprocess.run(
        ["ldd", verbs.program(), driver], check=True, capture_output=True, text=True
    ).stdout
    needed = {Path(name) for name in re.findall(r"(/\S+) \(", shown)}
    files = {str(file)[1:]: file for file in (driver, configuration, *needed)}
    files |= {"usr/bin/hold_objects": verbs.program()}
    layer = _layer(BUSYBOX, {name: file.read_bytes() for name, file in files.items()})
    _write_archive(path, VERBS, layer, ["/bin/sh"], ["PATH=/usr/bin:/bin"])


def write_for_jobs(path: Path) -> None:
    """Write the archive of `JOBS`. Its layer is kept in the cache: Debian's packages take a
    minute."""
    script, program = (HERE / name for name in ("jobs_image.sh", "mpi_program.c"))
    sources = b"".join(file.read_bytes() for file in (script, program, verbs.SOURCE))
    layer = programs.CACHE / f"jobs-{hashlib.sha256(sources).hexdigest()[:8]}.tar"
    if not layer.exists():
        layer.parent.mkdir(parents=True, exist_ok=True)
        unfinished = layer.with_name(f"{layer.name}.new")
        subprocess.run([script, verbs.program(), unfinished], check=True)
        unfinished.rename(layer)
    variables = ["PATH=/usr/sbin:/usr/bin:/bin"]
    _write_archive(path, JOBS, layer.read_bytes(), ["/bin/sh"], variables)


def _layer(busybox: Path, more: Mapping[str, bytes] = {}) -> bytes:
    links = subprocess.run(
        [busybox, "--list"], check=True, capture_output=True, text=True
    ).stdout.split()
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for directory in ("bin", "dev", "etc", "proc", "root", "sys", "tmp"):
            member = tarfile.TarInfo(directory)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(member)
        member = tarfile.TarInfo("bin/busybox")
        member.mode, member.size = 0o755, busybox.stat().st_size
        tar.addfile(member, io.BytesIO(busybox.read_bytes()))
        for name in sorted(set(links) - {"busybox"}):
            member = tarfile.TarInfo(f"bin/{name}")
            member.type, member.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(member)
        for name, data in more.items():
            member = tarfile.TarInfo(name)
            member.mode, member.size = 0o755, len(data)
            tar.addfile(member, io.BytesIO(data))
    return content.getvalue()


def _write_archive(
    path: Path, name: str, layer: bytes, command: list[str], variables: list[str]
) -> None:
    """An OCI image layout in a tar file, with one image of one layer."""
    compressed = gzip.compress(layer, 1, mtime=0)
    configuration = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": command, "Env": variables},
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
    }
    blobs = {"config": json.dumps(configuration).encode(), "layer": compressed}
    media = "application/vnd.oci.image"
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{media}.manifest.v1+json",
        "config": _descriptor(f"{media}.config.v1+json", blobs["config"]),
        "layers": [_descriptor(f"{media}.layer.v1.tar+gzip", compressed)],
    }
    blobs["manifest"] = json.dumps(manifest).encode()
    entry = _descriptor(manifest["mediaType"], blobs["manifest"])
    entry["annotations"] = {
        "io.containerd.image.name": name,
        "org.opencontainers.image.ref.name": name.rpartition(":")[2],
    }
    files = {
        "oci-layout": json.dumps({"imageLayoutVersion": "1.0.0"}).encode(),
        "index.json": json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode(),
    }
    for content in blobs.values():
        files[f"blobs/sha256/{_digest(content).removeprefix('sha256:')}"] = content
    with tarfile.open(path, mode="w") as tar:
        for file, content in files.items():
            member = tarfile.TarInfo(file)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def _descriptor(media_type: object, content: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _digest(content), "size": len(content)}


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
