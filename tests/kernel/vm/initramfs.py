"""The initramfs: busybox, `init.sh`, and the modules that are needed to reach the host's root."""

import hashlib
import lzma
import stat
from collections.abc import Iterator
from pathlib import Path

from . import debian, layout

BUSYBOX = Path("/bin/busybox")
MODULES = ("virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay")
DIRECTORIES = ("bin", "dev", "host", "modules", "overlay", "proc", "root", "sys")


def build() -> None:
    """Write the initramfs, unless it exists with exactly this content."""
    archive = b"".join(_archive())
    stamp = layout.INITRAMFS.with_suffix(".sha256")
    digest = hashlib.sha256(archive).hexdigest()
    if layout.INITRAMFS.exists() and stamp.exists() and stamp.read_text() == digest:
        return
    stamp.unlink(missing_ok=True)
    layout.INITRAMFS.write_bytes(archive)
    stamp.write_text(digest)


def _archive() -> Iterator[bytes]:
    """A cpio archive of format newc (kernel: Documentation/driver-api/early-userspace)."""
    for directory in DIRECTORIES:
        yield _member(directory, stat.S_IFDIR | 0o755, b"")
    yield _member("bin/busybox", stat.S_IFREG | 0o755, BUSYBOX.read_bytes())
    yield _member("init", stat.S_IFREG | 0o755, layout.INIT_SCRIPT.read_bytes())
    order = []
    for path in _in_load_order(MODULES):
        content = path.read_bytes()
        if path.suffix == ".xz":
            content = lzma.decompress(content)
        name = path.name.removesuffix(".xz")
        order.append(f"{name}\n")
        yield _member(f"modules/{name}", stat.S_IFREG | 0o644, content)
    yield _member("modules/order", stat.S_IFREG | 0o644, "".join(order).encode())
    yield _member("TRAILER!!!", 0, b"")


def _member(name: str, mode: int, content: bytes) -> bytes:
    encoded = name.encode() + b"\0"
    # ino, mode, uid, gid, nlink, mtime, filesize, dev and rdev (major, minor), namesize, check
    fields = (0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(encoded), 0)
    header = b"070701" + b"".join(b"%08x" % field for field in fields) + encoded
    return _padded(header) + _padded(content)


def _padded(piece: bytes) -> bytes:
    return piece + bytes(-len(piece) % 4)


def _in_load_order(wanted: tuple[str, ...]) -> list[Path]:
    """The modules and their dependencies, each after its dependencies, without built-in ones."""
    directory = layout.KERNEL / "lib/modules" / debian.kernel_version()
    needs: dict[str, list[str]] = {}
    by_name: dict[str, str] = {}
    for line in (directory / "modules.dep").read_text().splitlines():
        module, _, dependencies = line.partition(":")
        needs[module] = dependencies.split()
        by_name[_module_name(module)] = module
    builtin = {
        _module_name(line) for line in (directory / "modules.builtin").read_text().splitlines()
    }
    ordered: dict[str, None] = {}
    for name in wanted:
        if name in builtin:
            continue
        # depmod lists the nearest dependency first, and all of them.
        ordered |= dict.fromkeys([*reversed(needs[by_name[name]]), by_name[name]])
    return [directory / module for module in ordered]


def _module_name(path: str) -> str:
    return Path(path).name.split(".ko")[0].replace("-", "_")
