"""`podfabric install` and `uninstall`: the CNI executables in a runtime's directory.

With `--gpu` also what keeps the limits of containers on GPUs (cli/shims.py).

Where another project's executable has a name of ours, `install` keeps it beside, and `uninstall`
puts it back (cli/executables.py). Both check everything before they change anything.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from base.documents import DocumentError
from base.files import sync_directory
from base.paths import Paths
from cli import executables, shims
from cli.arguments import file
from cli.executables import EVERY, FALLBACK, PLUGINS, REPLACED, exists, is_foreign, place_kept
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
        help=f"which of {', '.join(EVERY)} (default: all but nv-ipam and whereabouts)",
    )
    parser.add_argument(
        "--fallback",
        action="store_true",
        help="also install the scripts that run the plugins where the agent does not run",
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="also install what keeps the limits of containers on GPUs: libraries",
    )
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
    # A link before its target: a link to a launcher is ours, whatever it led to before.
    names = sorted(arguments.plugins, key=lambda name: not (bin_dir / name).is_symlink())
    contents |= {bin_dir / name: launcher for name in names}

    with executables.locked(bin_dir):
        _refuse(bin_dir, contents)
        if arguments.fallback:
            contents[fallback / installation.NAME] = _describe(bin_dir)
            fallback.mkdir(mode=0o755, exist_ok=True)
        foreign = (bin_dir / name for name in names)
        kept = {path: place_kept(path) for path in foreign if is_foreign(path)}
        for place in kept.values():
            place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        executables.install(contents, kept)
        yield from (f"kept {place}, which was {path}" for path, place in kept.items())
        yield from (f"installed {path}" for path in contents)
        if not arguments.fallback:
            yield from _remove_fallback(fallback)
    if arguments.gpu:
        yield from shims.install(libraries, Paths.from_environ(os.environ).shims)


def _uninstall(arguments: argparse.Namespace) -> Iterator[str]:
    yield from uninstall(arguments.bin_dir)
    yield from shims.uninstall(Paths.from_environ(os.environ).shims)


def uninstall(bin_dir: Path) -> Iterator[str]:
    """Remove podfabric's executables, and put back those whose places they have; a line for each.

    Raises InstallRefused, OSError.
    """
    if not bin_dir.is_dir():
        raise InstallRefused(f"{bin_dir}: is not a directory: name the runtime's with --bin-dir")
    with executables.locked(bin_dir):
        paths = [bin_dir / name for name in EVERY]
        for path in sorted(paths, key=lambda path: place_kept(path).is_symlink()):  # links last
            yield from _give_back(path)
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


def _refuse(bin_dir: Path, contents: dict[Path, bytes]) -> None:
    for own in (bin_dir / FALLBACK, bin_dir / REPLACED):
        if exists(own) and (own.is_symlink() or not own.is_dir()):
            raise InstallRefused(f"{own}: is not a directory of podfabric: remove it")
    for path in contents:
        if path.is_dir() and not path.is_symlink():
            raise InstallRefused(f"{path}: is a directory: remove it")
        if path.parent != bin_dir and is_foreign(path):
            raise InstallRefused(f"{path}: is not podfabric's, so nothing was changed: remove it")


def _give_back(path: Path) -> Iterator[str]:
    """Remove the launcher `path`, or put back what had its place.

    Another project's file that has the place again is newer than what was kept of that project.
    """
    kept = place_kept(path)
    if executables.is_ours(kept):  # of an installation that was killed
        kept.unlink()
    if exists(kept) and not is_foreign(path):
        kept.replace(path)
        yield f"put back {path}"
    else:
        yield from _remove([path])
        if exists(kept):
            kept.unlink()
            yield f"removed {kept}: {path} is newer"


def _remove_fallback(fallback: Path) -> Iterator[str]:
    """Remove our scripts, and their directory if it is empty then."""
    if fallback.is_symlink() or not fallback.is_dir():
        return
    replaced = fallback.parent / REPLACED
    with suppress(OSError):  # it is not there, or has what is not ours
        replaced.rmdir()
    yield from _remove(path for path in sorted(fallback.iterdir()) if path != replaced)
    if not any(fallback.iterdir()):
        fallback.rmdir()
        sync_directory(fallback.parent)


def _remove(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        if executables.is_ours(path):
            path.unlink()
            yield f"removed {path}"
        elif exists(path):
            yield f"left {path}: it is not podfabric's"
