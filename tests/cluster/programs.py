"""The programs of a cluster, built once from the Go module proxy into a cache.

`python -m tests.cluster.programs [KUBERNETES VERSION]` builds the missing programs and prints the
directory of each. The name of a program's directory contains its version and its kind of build. A
directory is complete or absent.

Each version below is a program's own. Its go.mod determines the versions of its dependencies, and
the Go command checks all of them against the checksum database.
"""

import fcntl
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.kernel.vm import debian

KUBERNETES = "1.36.3"
CACHE = Path(os.environ.get("PODFABRIC_CACHE", "~/.cache/podfabric")).expanduser() / "cluster"
_BESIDE = Path(__file__).resolve().parents[2].parent / "shared/peers"
PEERS = os.environ.get("PODFABRIC_PEERS") or (str(_BESIDE) if _BESIDE.is_dir() else None)
"""A directory with archives of sources, which are taken in place of the module proxy's: the one
that is beside the checkout, unless PODFABRIC_PEERS names another."""

COMPONENTS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl")
KUBERNETES_MAIN = Path(__file__).with_name("kubernetes.go")
"""One executable for all components: most of their code is the same."""

PACKAGES: Mapping[str, str] = {
    "gcc": "/usr/bin/gcc",
    "libc6-dev": "/usr/include/stdio.h",
    "libseccomp-dev": "/usr/include/seccomp.h",
    "pkg-config": "/usr/bin/pkg-config",
}
GO = shutil.which("go", path=f"{os.environ.get('PATH', '')}:/usr/local/go/bin")
NOT_IN_THE_NODE = (Path("/dev"), Path("/proc"), Path("/run"), Path("/sys"), Path("/tmp"))
"""The node has its own of these, and all else of this machine."""
UNFINISHED = "unfinished-"
"""Prefix of what is being built: nothing else in the cache is ever incomplete."""
NET_ATTACH_DEF_CLIENT = "github.com/k8snetworkplumbingwg/network-attachment-definition-client"


@dataclass(frozen=True)
class Program:
    """Executables of one Go module. `packages`: an executable's name and its main package."""

    name: str
    module: str
    version: str
    packages: Mapping[str, str]
    tags: str = ""
    static: bool = False
    """Has code in C, which is linked into the executable."""
    archives: Sequence[tuple[str, str]] = ()
    """Archives of `PEERS`: the module's own first, then those that replace others. Each with the
    module that it has."""

    def directory(self) -> Path:
        """The directory of its executables, which may not exist yet."""
        recipe: list[object] = [
            self.module,
            self.version,
            dict(self.packages),
            self.tags,
            self.static,
        ]
        recipe += [path.name for path in self.archive_files()]
        if self.name == "kubernetes":
            recipe.append(KUBERNETES_MAIN.read_text())
        digest = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:8]
        return CACHE / f"{self.name}-{self.version.removeprefix('v')}-{digest}"

    def archive_files(self) -> list[Path]:
        """Its archives; an empty list unless `PEERS` has all of them."""
        if PEERS is None:
            return []
        found = [sorted(Path(PEERS).glob(f"{name}-*.tar.*"))[:1] for name, _ in self.archives]
        return [path for paths in found for path in paths] if all(found) else []


def programs(kubernetes: str = KUBERNETES) -> list[Program]:
    """All programs of a cluster of this version of Kubernetes, the slowest build last."""
    plugins = {"bridge": "main", "host-device": "main", "host-local": "ipam", "loopback": "main"}
    return [
        Program("etcd", "go.etcd.io/etcd/server/v3", "v3.6.16", {"etcd": "."}),
        Program(
            "runc",
            "github.com/opencontainers/runc",
            "v1.3.4",
            {"runc": "."},
            tags="seccomp,netgo,osusergo",  # without seccomp no sandbox starts
            static=True,
        ),
        Program(
            "cni-plugins",
            "github.com/containernetworking/plugins",
            "v1.9.1",
            {name: f"plugins/{folder}/{name}" for name, folder in plugins.items()},
        ),
        Program(
            "multus",
            "gopkg.in/k8snetworkplumbingwg/multus-cni.v4",
            "v4.2.3",
            {"multus": "cmd/multus"},
            archives=[
                ("multus-cni", "gopkg.in/k8snetworkplumbingwg/multus-cni.v4"),
                ("network-attachment-definition-client", NET_ATTACH_DEF_CLIENT),
            ],
        ),
        Program(
            "containerd",
            "github.com/containerd/containerd/v2",
            "v2.3.7",
            {name: f"cmd/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr")},
            tags="no_btrfs,no_devmapper,no_zfs,no_aufs",
        ),
        Program(
            "kubernetes",
            "k8s.io/kubernetes",
            f"v{kubernetes}",
            dict.fromkeys(COMPONENTS, "."),
        ),
    ]


def build(wanted: Sequence[Program]) -> list[Path]:
    """Build the missing programs; returns the directories of all."""
    if any(CACHE.resolve().is_relative_to(each) for each in NOT_IN_THE_NODE):
        raise SystemExit(f"cluster: the node cannot see {CACHE}: set PODFABRIC_CACHE to another")
    directories = [program.directory() for program in wanted]
    if all(directory.exists() for directory in directories):
        return directories  # without the lock, which somebody else's build may hold for long
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in CACHE.glob(f"{UNFINISHED}*"):
            shutil.rmtree(leftover)  # of a build that was killed
        for program in wanted:
            if not program.directory().exists():
                debian.install(PACKAGES)
                _build(program)
    return directories


def _build(program: Program) -> None:
    message = f"cluster: building {program.name} {program.version}"
    print(message, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=CACHE) as temporary:
        source, made = Path(temporary, "source"), Path(temporary, "made")
        source.mkdir()
        made.mkdir()
        if program.name == "kubernetes":
            _prepare_kubernetes(program, source)
            _go_build(program, source, ".", made / COMPONENTS[0], _kubernetes_version(program))
            for component in COMPONENTS[1:]:
                (made / component).symlink_to(COMPONENTS[0])
        else:
            if program.archive_files():
                root = _unpack(program, source)
                module = "."
            else:
                root, module = source, program.module
                _go(root, "mod", "init", "cluster")
                _go(root, "get", "-tool", *_paths(program, module, f"@{program.version}"))
            for name, path in zip(program.packages, _paths(program, module), strict=True):
                _go_build(program, root, path, made / name)
        made.rename(program.directory())


def _paths(program: Program, module: str, suffix: str = "") -> list[str]:
    """The import paths of the program's main packages."""
    return [
        f"{module}{suffix}" if path == "." else f"{module}/{path}{suffix}"
        for path in program.packages.values()
    ]


def _go_build(
    program: Program, directory: Path, package: str, executable: Path, flags: str = ""
) -> None:
    flags = f"-s -w {flags}"
    if program.static:
        flags += " -linkmode external -extldflags -static"
    options = ["-mod=mod", "-trimpath", "-tags", program.tags, "-ldflags", flags]
    _go(directory, "build", *options, "-o", str(executable), package, cgo=program.static)


def _go(directory: Path, *arguments: str, cgo: bool = False) -> str:
    environment = {**os.environ, "CGO_ENABLED": "1" if cgo else "0", "GOWORK": "off"}
    if GO is None:
        raise SystemExit("cluster: no Go: install 1.21 or later, which gets the version it needs")
    command = ["nice", "-n", "10", GO, *arguments]
    done = subprocess.run(
        command, cwd=directory, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"cluster: {shlex.join(command)} failed with {done.returncode}")
    return done.stdout


def _unpack(program: Program, source: Path) -> Path:
    """Unpack the archives. The other modules replace dependencies of the first; returns its
    directory."""
    roots: list[tuple[Path, str]] = []
    for (name, module), archive in zip(program.archives, program.archive_files(), strict=True):
        root = source / name
        root.mkdir()
        command = ["tar", "--extract", "--strip-components=1", f"--directory={root}"]
        subprocess.run([*command, f"--file={archive}"], check=True)
        roots.append((root, module))
    (own, _), *others = roots
    for root, module in others:
        _go(own, "mod", "edit", "-replace", f"{module}={root}")
    return own


def _prepare_kubernetes(program: Program, source: Path) -> None:
    """A module with Kubernetes' requirements, and its staging modules in their published form.

    Kubernetes' own go.mod replaces them by directories that the published module lacks.
    """
    shutil.copy(KUBERNETES_MAIN, source / "main.go")
    _go(source, "mod", "init", "cluster")
    found = json.loads(
        _go(source, "mod", "download", "-json", f"{program.module}@{program.version}")
    )
    theirs = json.loads(_go(source, "mod", "edit", "-json", found["GoMod"]))
    staged = {each["Old"]["Path"] for each in theirs["Replace"]}
    published = "v0." + program.version.split(".", 1)[1]
    edits = [f"-go={theirs['Go']}", f"-require={program.module}@{program.version}"]
    for each in theirs["Require"]:
        if each["Path"] not in staged:
            edits.append(f"-require={each['Path']}@{each['Version']}")
    for path in sorted(staged):
        edits += [f"-require={path}@{published}", f"-replace={path}={path}@{published}"]
    _go(source, "mod", "edit", *edits)


def _kubernetes_version(program: Program) -> str:
    """The version that `kubectl version` and charts see, set as Kubernetes' own build does."""
    major, minor, _ = program.version.removeprefix("v").split(".")
    fields = {"gitVersion": program.version, "gitMajor": major, "gitMinor": minor}
    return " ".join(
        f"-X k8s.io/component-base/version.{name}={value}" for name, value in fields.items()
    )


if __name__ == "__main__":
    version = sys.argv[1] if len(sys.argv) > 1 else KUBERNETES
    print(*build(programs(version)), sep="\n")
