"""Paths: the checkout, and the files that `prepare` keeps below `build/vm`."""

import os
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[3]
PYTHON = CHECKOUT / ".venv" / "bin" / "python"

SOURCES = CHECKOUT / "tests" / "kernel"
IBLOOP_SOURCES = SOURCES / "ibloop"
INIT_SCRIPT = SOURCES / "vm" / "init.sh"
GUEST_SCRIPT = SOURCES / "vm" / "guest.sh"

BUILD = CHECKOUT / "build" / "vm"
LOCK = BUILD / "lock"
KERNEL = BUILD / "kernel"
"""A link to `kernel-<version>`: the unpacked image, modules and headers of exactly one version."""
VMLINUX = KERNEL / "boot/vmlinux"
INITRAMFS = BUILD / "initramfs.cpio"
UNFINISHED = "unfinished-"
"""Prefix of what `prepare` works on: below `build/vm` nothing else is ever incomplete."""
RESULTS = BUILD / f"results{os.environ.get('PODFABRIC_VM_NAME', '')}"
"""What the last run left: console.log, dmesg.log, output.log, and what the command put there."""
