"""Debian's packages: the tools of a run, and one kernel with its headers, unpacked only."""

import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from . import layout, vmlinux

TOOLS: Mapping[str, str] = {
    "busybox-static": "/bin/busybox",
    "gcc": "/usr/bin/gcc",
    "iproute2": "/usr/sbin/ip",
    "iputils-ping": "/usr/bin/ping",
    "kmod": "/sbin/modprobe",
    "ibverbs-providers": "/etc/libibverbs.d/rxe.driver",
    "libibverbs-dev": "/usr/include/infiniband/verbs.h",
    "libelf-dev": "/usr/include/libelf.h",  # the headers package's own programs are linked with it
    "make": "/usr/bin/make",
    "perl": "/usr/bin/corelist",  # kernel-doc, which W=1 runs, needs more than perl-base
    "util-linux": "/usr/bin/setpriv",
    "zstd": "/usr/bin/zstd",
}
"""Package: a file of it. Installed on the host, and so there in the guest too."""

QEMU = "/usr/bin/qemu-system-x86_64"
QEMU_PACKAGE = "qemu-system-x86"
QEMU_OLDEST = 8
"""The first major version that has `igb`, the network card with virtual functions."""
BACKPORTS_SOURCE = Path("/etc/apt/sources.list.d/podfabric-backports.sources")
DEBIAN_KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

KERNEL_METAPACKAGES = ("linux-image-amd64", "linux-headers-amd64")


def install(packages: Mapping[str, str]) -> None:
    """Install those of `packages` (name: a file of it) whose file is missing. Needs root."""
    missing = [package for package, path in packages.items() if not Path(path).exists()]
    if missing:
        _with_fresh_lists(lambda: _apt_get_install(*missing))


def install_qemu() -> None:
    """Install QEMU, unless a recent one is installed; Debian 12's comes from its backports."""
    if Path(QEMU).exists() and _major_version(_output(QEMU, "--version")) >= QEMU_OLDEST:
        return
    _with_fresh_lists(_install_newer_qemu)


def unpack_kernel() -> None:
    """Download and unpack the kernel, unless there is one.

    The version is the one that the distribution's metapackages name at the first unpacking. It
    stays until `build/vm` is removed. Image and headers always have the same version.
    """
    if not layout.KERNEL.exists():
        _with_fresh_lists(_unpack_newest_kernel)


def kernel_version() -> str:
    """The unpacked kernel's version, as `uname -r` prints it in the guest."""
    return layout.KERNEL.readlink().name.removeprefix("kernel-")


def compiler() -> dict[str, str]:
    """The compiler that built the unpacked kernel, as `install` takes it."""
    variables = headers_directory() / ".kernelvariables"
    found = re.search(r"\bgcc-\d+\b", variables.read_text())
    name = found.group() if found else "gcc"
    return {name: f"/usr/bin/{name}"}


def headers_directory() -> Path:
    """The directory with which `make -C` builds a module for the unpacked kernel."""
    return layout.KERNEL.resolve() / "usr/src" / f"linux-headers-{kernel_version()}"


def _apt_get_install(*arguments: str) -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    options = ["--yes", "--quiet", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300"]
    subprocess.run(["apt-get", "install", *options, *arguments], check=True, env=environment)


def _install_newer_qemu() -> None:
    policy = _output("apt-cache", "policy", QEMU_PACKAGE)
    candidate = re.search(r"Candidate: \d+:(\S+)", policy)
    if not candidate:
        raise LookupError(f"apt knows no {QEMU_PACKAGE}")
    if _major_version(candidate.group(1)) >= QEMU_OLDEST:
        _apt_get_install(QEMU_PACKAGE)
    else:
        _apt_get_install(QEMU_PACKAGE, "--target-release", _backports())


def _backports() -> str:
    """The name of the distribution's backports. They are added to apt's sources if necessary."""
    codename = platform.freedesktop_os_release()["VERSION_CODENAME"]
    backports = f"{codename}-backports"
    # apt itself reports its sources, in any of their formats, with the code name. A source may say
    # "stable" in place of the code name.
    wanted = "$(CODENAME) $(COMPONENT) $(REPO_URI) $(ORIGIN)"
    listed = _output("apt-get", "indextargets", "--format", wanted, "Created-By: Packages")
    addresses = {
        suite: address
        for suite, component, address, origin in (
            line.split(" ", 3) for line in listed.splitlines()
        )
        if component == "main" and origin.startswith("Debian")
    }
    if backports not in addresses:
        if codename not in addresses:
            raise LookupError(
                f"{QEMU_PACKAGE} {QEMU_OLDEST} or later is in {backports}, and no source of apt "
                f"has {codename} itself, to find that beside it: add {backports} to the sources"
            )
        BACKPORTS_SOURCE.write_text(
            "# Written by podfabric's virtual machine (tests/kernel/vm) for its QEMU.\n"
            f"Types: deb\nURIs: {addresses[codename]}\nSuites: {backports}\nComponents: main\n"
            f"Signed-By: {DEBIAN_KEYS}\n"
        )
        subprocess.run(["apt-get", "update", "--quiet"], check=True)
    return backports


def _major_version(text: str) -> int:
    found = re.search(r"\d+", text)
    return int(found.group()) if found else 0


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _with_fresh_lists(action: Callable[[], object]) -> None:
    """Try again after `apt-get update`: a new container image has no package lists, or old ones."""
    try:
        action()
    except (subprocess.CalledProcessError, LookupError):
        subprocess.run(["apt-get", "update", "--quiet"], check=True)
        try:
            action()
        except LookupError as error:
            raise SystemExit(f"vm: {error}") from error


def _unpack_newest_kernel() -> None:
    image, headers = (_named_by(metapackage) for metapackage in KERNEL_METAPACKAGES)
    version = image.removeprefix("linux-image-")
    if headers != f"linux-headers-{version}":
        raise LookupError(f"{image} and {headers} differ in version")
    built_from = [
        package
        for package in _depends(headers)
        if package.startswith(("linux-headers-", "linux-kbuild-"))
    ]
    unpacked = layout.BUILD / f"kernel-{version}"
    with tempfile.TemporaryDirectory(prefix=layout.UNFINISHED, dir=layout.BUILD) as temporary:
        root = Path(temporary) / "root"
        _download_and_unpack([image, headers, *built_from], root)
        if not (root / "lib").exists():
            (root / "lib").symlink_to("usr/lib")  # Debian 13 ships the modules there
        _make_relocatable(root / "usr/src" / headers / "Makefile")
        vmlinux.extract(root / "boot" / f"vmlinuz-{version}", root / "boot/vmlinux")
        subprocess.run(["/sbin/depmod", "-b", root, version], check=True)
        shutil.rmtree(unpacked, ignore_errors=True)
        root.rename(unpacked)
        link = Path(temporary) / "link"
        link.symlink_to(unpacked.name)
        link.rename(layout.KERNEL)


def _depends(package: str) -> list[str]:
    printed = _output("apt-cache", "depends", "--important", package)
    return re.findall(r"^ *\|?Depends: (\S+)$", printed, re.MULTILINE)


def _named_by(metapackage: str) -> str:
    for package in _depends(metapackage):
        if package.startswith(metapackage.removesuffix("amd64")):
            return package
    raise LookupError(f"apt knows no package that {metapackage} depends on")


def _download_and_unpack(packages: Sequence[str], root: Path) -> None:
    downloads = root.with_name("downloads")
    downloads.mkdir()
    # As root, apt would switch to a user that may not enter a private directory.
    command = ["apt-get", "-o", "APT::Sandbox::User=root", "download", "--quiet", *packages]
    subprocess.run(command, check=True, cwd=downloads)
    root.mkdir()
    for archive in sorted(downloads.glob("*.deb")):
        subprocess.run(["dpkg", "-x", archive, root], check=True)


def _make_relocatable(makefile: Path) -> None:
    """Replace the absolute path of the common headers: they are not installed in /usr/src."""
    here = "$(dir $(lastword $(MAKEFILE_LIST)))"
    makefile.write_text(makefile.read_text().replace("include /usr/src/", f"include {here}../"))
