"""The `ibloop` kernel module, built for the unpacked kernel and put among its modules."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from . import debian, layout


def build() -> None:
    """Build and install `ibloop.ko`, unless it exists for exactly these sources."""
    version = debian.kernel_version()
    updates = layout.KERNEL / "lib/modules" / version / "updates"
    stamp = updates / "ibloop.sources"
    sources = _digest(layout.IBLOOP_SOURCES)
    if stamp.exists() and stamp.read_text() == sources:
        return
    stamp.unlink(missing_ok=True)
    updates.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=layout.UNFINISHED, dir=layout.BUILD) as temporary:
        directory = Path(temporary) / "ibloop"
        shutil.copytree(layout.IBLOOP_SOURCES, directory)
        _make(directory)
        (directory / "ibloop.ko").rename(updates / "ibloop.ko")
    subprocess.run(["/sbin/depmod", "-b", layout.KERNEL, version], check=True)
    stamp.write_text(sources)


def _digest(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _make(directory: Path) -> None:
    command: list[str | Path] = [
        "make",
        "-C",
        debian.headers_directory(),
        f"M={directory}",
        f"-j{os.cpu_count()}",
        "CONFIG_DEBUG_INFO_BTF_MODULES=",  # BTF needs pahole and the kernel's vmlinux
        "W=1",
        "modules",
    ]
    done = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode or "warning:" in done.stdout:
        raise SystemExit(f"vm: ibloop does not build cleanly:\n{done.stdout}")
