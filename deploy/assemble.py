"""Assemble the root of podfabric's image, in the build's last stage (Containerfile).

`assemble.py ROOT ENVIRONMENT` copies the virtual environment, Debian's package of its interpreter
and its dependencies into ROOT, and writes an SBOM (CycloneDX 1.5) of just these packages.
It uses only the standard library, because it runs in that stage, on Debian's interpreter.
"""

import compileall
import importlib.metadata
import importlib.util
import json
import os
import platform
import py_compile
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DPKG = Path("/var/lib/dpkg")
SBOM = Path("usr/share/podfabric/sbom.cdx.json")
LIBRARIES = ("libstdc++6",)  # wheels link it (PEP 600), and no package depends on it
TRANSFER = "ib_write_bw"  # the program of perftest that `podfabric check` starts
# Needed only while a package is installed, by an interactive shell, or for names of PCI devices.
NOT_NEEDED = {
    *("adduser", "debconf", "dpkg", "install-info", "media-types", "pci.ids"),
    *("readline-common", "tar"),
}
NO_FILES = ("/usr/share/man", "/usr/share/lintian", "/usr/share/locale", "/usr/share/bug")
DOCUMENTS = Path("/usr/share/doc")

# Most of the API server's client is models and calls of each kind, and a second copy for asyncio.
# podfabric has its own documents (kube/encoding.py). The client imports its models on demand.
GENERATED = ("aio", "client/api/*_api.py", "client/models/*_*.py", "**/*_test.py")
ONLY_FOR_ASYNCIO = (
    *("aiohappyeyeballs", "aiohttp", "aiohttp-retry", "aiosignal", "attrs", "frozenlist"),
    *("multidict", "propcache", "yarl"),
)

Package = dict[str, str]


def main() -> None:
    """Assemble ROOT."""
    root, environment = Path(sys.argv[1]), Path(sys.argv[2])
    interpreter = (environment / "bin/python3").resolve()
    packages = needed((interpreter.name, "perftest", *LIBRARIES), installed())
    leave_out_of_client(site_packages(environment))
    for registry in (site_packages(environment) / "netaddr/eui").glob("*.txt"):
        registry.unlink()  # vendors of MACs: 8 MB that no code reads
    make_skeleton(root)
    for package in packages:
        copy(package, root)
    no_scripts = shutil.ignore_patterns("[Aa]ctivate*")  # for shells
    shutil.copytree(
        environment, root / environment.relative_to("/"), symlinks=True, ignore=no_scripts
    )
    # On a read-only root Python cannot write compiled files, and no file here ever changes.
    compileall.compile_dir(
        root / "usr/lib" / interpreter.name,
        stripdir=str(root),
        quiet=2,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    (root / SBOM).parent.mkdir(parents=True)
    (root / SBOM).write_text(json.dumps(sbom(packages, environment), indent=1) + "\n")


def installed() -> dict[str, Package]:
    """The fields of every installed package of Debian, by its name."""
    packages = {}
    for paragraph in (DPKG / "status").read_text().split("\n\n"):
        lines = (line.partition(": ") for line in paragraph.splitlines() if line[:1] != " ")
        package = {key: value for key, _, value in lines}
        if package.get("Status") == "install ok installed":
            packages[package["Package"]] = package
    return packages


def needed(names: tuple[str, ...], packages: dict[str, Package]) -> list[Package]:
    """These packages and all their dependencies, by name."""
    found: dict[str, Package] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found or name in NOT_NEEDED:
            continue
        if name not in packages:
            raise SystemExit(f"assemble.py: {name} is not installed")
        found[name] = packages[name]
        waiting += dependencies(packages[name], packages)
    return [found[name] for name in sorted(found)]


def dependencies(package: Package, packages: dict[str, Package]) -> Iterator[str]:
    """The packages that this one depends on; of alternatives, the installed one."""
    for field in ("Depends", "Pre-Depends"):
        for alternatives in filter(None, package.get(field, "").split(",")):
            names = [text.split("(")[0].split(":")[0].strip() for text in alternatives.split("|")]
            yield next((name for name in names if name in packages), names[0])


def make_skeleton(root: Path) -> None:
    """Make what is in no package's list of files: merged /usr, users, directories for the
    runtime."""
    for name in ("bin", "lib", "lib64", "sbin"):
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    for name in ("dev", "etc", "host", "opt", "proc", "run", "sys", "tmp", "var"):
        (root / name).mkdir()
    (root / "tmp").chmod(0o1777)
    (root / "var/run").symlink_to("/run")
    (root / "etc/passwd").write_text(
        "root:x:0:0:root:/:/nonexistent\npodfabric:x:65532:65532:podfabric:/:/nonexistent\n"
    )
    (root / "etc/group").write_text("root:x:0:\npodfabric:x:65532:\n")
    shutil.copy("/usr/lib/os-release", root / "usr/lib/os-release")  # scanners read it
    (root / "etc/os-release").symlink_to("../usr/lib/os-release")


def copy(package: Package, root: Path) -> None:
    """Copy the files of an installed package."""
    lists = DPKG / "info"
    multiarch = lists / f"{package['Package']}:{package['Architecture']}.list"
    names = multiarch if multiarch.exists() else lists / f"{package['Package']}.list"
    for name in names.read_text().splitlines():
        source = Path(name)
        if name.startswith(NO_FILES) or not os.path.lexists(name) or not wanted(source):
            continue
        # Resolves the links /lib, /bin and so on, which exist in both roots.
        target = root / name.lstrip("/")
        if source.is_dir() and not source.is_symlink():
            target.mkdir(parents=True, exist_ok=True)
        elif not os.path.lexists(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def wanted(source: Path) -> bool:
    """Whether a file is needed: tools next to the interpreter are not; of documents, only
    licenses."""
    if source.parent == Path("/usr/bin"):
        return source.name.startswith("python") or source.name == TRANSFER
    if DOCUMENTS in source.parents and not source.is_dir():
        return source.name == "copyright"
    return True


def site_packages(environment: Path) -> Path:
    """The directory of the environment's Python packages."""
    code = "import sysconfig as s; print(s.get_path('purelib'))"
    said = subprocess.check_output([environment / "bin/python3", "-Ic", code], text=True)
    return Path(said.strip())


def leave_out_of_client(site: Path) -> None:
    """Delete the parts of `kubernetes` that podfabric never imports, and their dependencies."""
    for name in ONLY_FOR_ASYNCIO:
        for file in importlib.metadata.Distribution.discover(name=name, path=[str(site)]):
            for path in {
                site / each.parts[0] for each in file.files or () if ".." not in each.parts
            }:
                shutil.rmtree(path)
    for pattern in GENERATED:
        for path in (site / "kubernetes").glob(pattern):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
                compiled = importlib.util.cache_from_source(str(path))
                Path(compiled).unlink(missing_ok=True)


def sbom(packages: list[Package], environment: Path) -> dict[str, Any]:
    """The bill of materials: CycloneDX 1.5."""
    site = str(site_packages(environment))
    python = sorted(importlib.metadata.distributions(path=[site]), key=lambda one: one.name.lower())
    components = [pypi(one) for one in python if one.name != "podfabric"]
    components += [debian(package) for package in packages]
    (ours,) = (one for one in python if one.name == "podfabric")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {**pypi(ours), "type": "container", "licenses": license_of("Apache-2.0")}
        },
        "components": components,
    }


def license_of(name: str) -> list[dict[str, Any]]:
    """A license in CycloneDX' form."""
    return [{"license": {"name": name}}] if name else []


def pypi(distribution: importlib.metadata.Distribution) -> dict[str, Any]:
    """The component of a Python package."""
    metadata = distribution.metadata.json
    stated = str(metadata.get("license_expression") or metadata.get("license") or "")
    name = str(metadata["name"]).lower().replace("_", "-").replace(".", "-")
    return {
        "type": "library",
        "name": name,
        "version": distribution.version,
        "purl": f"pkg:pypi/{name}@{distribution.version}",
        "licenses": license_of(stated.splitlines()[0] if stated else ""),
    }


def debian(package: Package) -> dict[str, Any]:
    """The component of a Debian package. Its license is in /usr/share/doc/NAME/copyright."""
    release = platform.freedesktop_os_release()["VERSION_ID"]
    name, version = package["Package"], package["Version"]
    quoted = version.replace("+", "%2B").replace(":", "%3A")
    where = f"arch={package['Architecture']}&distro=debian-{release}"
    return {
        "type": "library",
        "name": name,
        "version": version,
        "purl": f"pkg:deb/debian/{name}@{quoted}?{where}",
    }


if __name__ == "__main__":
    main()
