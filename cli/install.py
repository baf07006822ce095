"""`podfabric install` and `uninstall`: the CNI executables in a runtime's directory.

With `--gpu` also what keeps the limits of containers on GPUs (cli/shims.py).

Both leave the files of other software alone, and check everything before they change anything.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from base.documents import DocumentError
from base.files import sync_directory
from base.paths import Paths
from cli import executables, shims
from cli.arguments import file
from cli.executables import EVERY, FALLBACK, PLUGINS
from cni import installation
from ipam import scope

DEFAULT_BIN_DIR = Path("/opt/cni/bin")


class InstallRefused(Exception):
    """The command cannot run. The text names the file and says what to do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `podfabric install`."""
    parser.add_argument(
        "--plugins",
        type=_plugins,
        default=tuple(PLUGINS),
        metavar="NAME,...",
        help=f"which of {', '.join(EVERY)} (default: all but nv-ipam)",
    )
    parser.add_argument(
        "--fallback",
        action="store_true",
        help="also install the scripts that run the plugins where the agent does not run",
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="also install what keeps the limits of containers on GPUs: libraries and a hook",
    )
    parser.add_argument("--force", action="store_true", help="overwrite files of other software")
    parser.add_argument(
        "--launcher",
        type=file,
        default=executables.LAUNCHER,
        help="default: the image's for this machine, else what `make cni` built",
    )
    _add_bin_dir(parser)
    parser.set_defaults(main=run, action=_install)


def add_uninstall_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `podfabric uninstall`."""
    _add_bin_dir(parser)
    parser.set_defaults(main=run, action=_uninstall)


def _add_bin_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bin-dir", type=file, default=DEFAULT_BIN_DIR, help=f"default: {DEFAULT_BIN_DIR}"
    )


def run(arguments: argparse.Namespace) -> int:
    """Install or uninstall; the exit code."""
    name = arguments.action.__name__.strip("_")
    try:
        lines = list(arguments.action(arguments))  # print only after all of it is done
    except InstallRefused as refused:
        sys.stderr.write(f"podfabric {name}: {refused}\n")
        return 1
    except OSError as error:
        sys.stderr.write(
            f"podfabric {name}: {error.filename}: {error.strerror}: run it as root, on a "
            "writable directory\n"
        )
        return 1
    for line in lines:
        sys.stdout.write(f"{line}\n")
    return 0


def _install(arguments: argparse.Namespace) -> Iterator[str]:
    launcher = _read_launcher(arguments.launcher)
    libraries = _read_libraries() if arguments.gpu else {}
    bin_dir: Path = arguments.bin_dir
    if bin_dir == DEFAULT_BIN_DIR:  # the usual directory, which may not exist yet
        bin_dir.mkdir(parents=True, exist_ok=True)
    if not bin_dir.is_dir():
        raise InstallRefused(
            f"{bin_dir}: is not a directory: create it, or name the runtime's with --bin-dir"
        )
    fallback = bin_dir / FALLBACK
    contents: dict[Path, bytes] = {}
    if arguments.fallback:
        _require_scope(Paths.from_environ(os.environ))
        # First, so that no launcher lacks its fallback.
        contents = {fallback / installation.NAME: b""}
        contents |= {fallback / name: executables.script(name) for name in arguments.plugins}
    contents |= {bin_dir / name: launcher for name in arguments.plugins}

    with executables.locked(bin_dir):
        _refuse_foreign(fallback, contents, force=arguments.force)
        if arguments.fallback:
            contents[fallback / installation.NAME] = _describe(bin_dir)
            fallback.mkdir(mode=0o755, exist_ok=True)
        executables.install(contents)
        yield from (f"installed {path}" for path in contents)
        if not arguments.fallback:
            yield from _remove_fallback(fallback)
    if arguments.gpu:
        yield from shims.install(libraries, Paths.from_environ(os.environ).shims)


def _uninstall(arguments: argparse.Namespace) -> Iterator[str]:
    yield from uninstall(arguments.bin_dir)
    yield from shims.uninstall(Paths.from_environ(os.environ).shims)


def uninstall(bin_dir: Path) -> Iterator[str]:
    """Remove podfabric's executables; a line for each. Raises InstallRefused, OSError."""
    if not bin_dir.is_dir():
        raise InstallRefused(f"{bin_dir}: is not a directory: name the runtime's with --bin-dir")
    with executables.locked(bin_dir):
        yield from _remove(bin_dir / name for name in EVERY)
        yield from _remove_fallback(bin_dir / FALLBACK)
        sync_directory(bin_dir)


def _describe(bin_dir: Path) -> bytes:
    """The installation file for the fallback, from this command's environment."""
    paths = msgspec.structs.replace(Paths.from_environ(os.environ), cni_bin=bin_dir)
    try:
        return installation.describe(paths)
    except installation.OtherState as other:
        raise InstallRefused(
            f"{other}: remove that file, or name another PODFABRIC_STATE"
        ) from None


def _require_scope(paths: Paths) -> None:
    """A node's fallback must not hand out addresses that other nodes lease.

    It reads the host's configuration, and the agents of a cluster read the chart's ConfigMap: where
    they use the scope `cluster`, the default of a host that says nothing is the wrong one.
    """
    if not paths.kubelet.is_dir():
        return  # no node of Kubernetes
    try:
        said = scope.said(paths.config)
    except DocumentError as error:
        raise InstallRefused(f"{error}: nothing was changed") from None
    if said is None:
        raise InstallRefused(
            f'{paths.config} does not say "ipam.scope", which the fallback goes by, and nothing '
            "was changed: write there what this cluster's agents use, `ipam: {scope: cluster}` "
            "(the chart's default) or `ipam: {scope: node}`"
        )


def _plugins(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in EVERY:
            plugins = ", ".join(EVERY)
            raise argparse.ArgumentTypeError(f'no plugin "{name}": choose from {plugins}')
    return names


def _read_launcher(path: Path) -> bytes:
    if not path.is_file():
        raise InstallRefused(
            f"{path}: this launcher does not exist: run `make cni`, or use --launcher"
        )
    content = path.read_bytes()
    if not executables.is_launcher(content):
        raise InstallRefused(
            f"{path}: is not a launcher of podfabric: run `make cni` and name its result"
        )
    return content


def _read_libraries() -> dict[str, bytes]:
    try:
        return shims.read(shims.BUILT)
    except shims.Missing as missing:
        raise InstallRefused(str(missing)) from None


def _refuse_foreign(fallback: Path, contents: dict[Path, bytes], *, force: bool) -> None:
    if _exists(fallback) and (fallback.is_symlink() or not fallback.is_dir()):
        raise InstallRefused(f"{fallback}: is not a directory of podfabric: remove it")
    existing = [path for path in contents if _exists(path)]
    for path in existing:
        if path.is_dir() and not path.is_symlink():
            raise InstallRefused(f"{path}: is a directory: remove it")
    foreign = [str(path) for path in existing if not executables.is_ours(path)]
    if foreign and not force:
        raise InstallRefused(
            f"{', '.join(foreign)}: not podfabric's, so nothing was changed: remove them, or "
            "overwrite them with --force"
        )


def _remove_fallback(fallback: Path) -> Iterator[str]:
    """Remove our scripts, and their directory if it is empty then."""
    if fallback.is_symlink() or not fallback.is_dir():
        return
    yield from _remove(sorted(fallback.iterdir()))
    if not any(fallback.iterdir()):
        fallback.rmdir()
        sync_directory(fallback.parent)


def _remove(paths: "Iterator[Path] | list[Path]") -> Iterator[str]:
    for path in paths:
        if executables.is_ours(path):
            path.unlink()
            yield f"removed {path}"
        elif _exists(path):
            yield f"left {path}: it is not podfabric's"


def _exists(path: Path) -> bool:
    """Whether the path exists, also as a broken link."""
    return path.is_symlink() or path.exists()
