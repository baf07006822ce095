"""`podfabric install` and `uninstall`: the CNI executables in a runtime's directory.

`install` moves another project's executable aside if it has a plugin's name. `uninstall` restores
this executable. `install` checks everything before the first change.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from base.files import sync_directory
from base.paths import Paths
from cli.arguments import file
from cli.setup import executables, shim_files
from cli.setup.executables import EVERY, INSTALLED, OWN, REPLACED, InstallRefused
from deviceplugin.allocate import memlock

DEFAULT_BIN_DIR = Path("/opt/cni/bin")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plugins",
        type=_plugins,
        default=tuple(executables.PLUGINS),
        metavar="NAME,...",
        help=f"which of {', '.join(EVERY)} (default: all but those of other projects)",
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="also install the libraries that keep the limits of containers on GPUs",
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
    _add_bin_dir(parser)
    parser.set_defaults(main=run, action=_uninstall)


def _add_bin_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bin-dir", type=file, default=DEFAULT_BIN_DIR, help=f"default: {DEFAULT_BIN_DIR}"
    )


def run(arguments: argparse.Namespace) -> int:
    name = arguments.action.__name__.strip("_")
    try:
        lines = list(arguments.action(arguments))  # print only after everything is done
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
    libraries = shim_files.read(shim_files.BUILT) if arguments.gpu else {}
    bin_dir: Path = arguments.bin_dir
    if bin_dir == DEFAULT_BIN_DIR:  # the usual directory, which may not exist yet
        bin_dir.mkdir(parents=True, exist_ok=True)
    if not bin_dir.is_dir():
        raise InstallRefused(
            f"{bin_dir}: is not a directory: create it, or name the runtime's CNI directory "
            "with --bin-dir"
        )
    # A link is replaced before its target, because a link to a launcher counts as a launcher.
    names = sorted(arguments.plugins, key=lambda name: not (bin_dir / name).is_symlink())
    contents = {bin_dir / name: launcher for name in (*names, memlock.HOOK)}

    with executables.locked(bin_dir):
        _refuse(bin_dir, contents)
        kept = {
            path: executables.place_kept(path) for path in contents if executables.is_foreign(path)
        }
        for place in kept.values():
            place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        executables.install(contents, kept)
        yield from (f"kept {place}, which was {path}" for path, place in kept.items())
        yield from (f"installed {path}" for path in contents)
    if arguments.gpu:
        yield from shim_files.install(libraries, Paths.from_environ(os.environ).shims)


def _uninstall(arguments: argparse.Namespace) -> Iterator[str]:
    yield from uninstall(arguments.bin_dir)
    yield from shim_files.uninstall(Paths.from_environ(os.environ).shims)


def uninstall(bin_dir: Path) -> Iterator[str]:
    """Remove our executables and restore the replaced ones. Raises InstallRefused, OSError.

    Containers that restart later get no hook.
    """
    if not bin_dir.is_dir():
        raise InstallRefused(
            f"{bin_dir}: is not a directory: name the runtime's CNI directory with --bin-dir"
        )
    if executables.is_ours(bin_dir / memlock.HOOK):
        memlock.retire(Paths.from_environ(os.environ))
    with executables.locked(bin_dir):
        paths = [bin_dir / name for name in INSTALLED]
        for path in sorted(
            paths, key=lambda path: executables.place_kept(path).is_symlink()
        ):  # links last
            yield from _give_back(path)
        for own in (REPLACED, OWN):
            with suppress(OSError):  # the directory does not exist, or has other files
                (bin_dir / own).rmdir()
        sync_directory(bin_dir)


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
            f"{path}: this launcher does not exist: run `make cni`, or name another with --launcher"
        )
    content = path.read_bytes()
    if not executables.is_launcher(content):
        raise InstallRefused(
            f"{path}: is not a launcher of podfabric: run `make cni`, and name build/cni/launcher "
            "with --launcher"
        )
    return content


def _refuse(bin_dir: Path, contents: dict[Path, bytes]) -> None:
    for own in (bin_dir / OWN, bin_dir / REPLACED):
        if executables.exists(own) and (own.is_symlink() or not own.is_dir()):
            raise InstallRefused(f"{own}: is not a directory: remove it")
    for path in contents:
        if path.is_dir() and not path.is_symlink():
            raise InstallRefused(f"{path}: is a directory: remove it")


def _give_back(path: Path) -> Iterator[str]:
    """Remove the launcher at `path`, or restore the file that the launcher replaced.

    If `path` has another project's file now, this newer file stays. The replaced file is removed.
    """
    kept = executables.place_kept(path)
    if executables.is_ours(kept):  # left by a killed `install`
        kept.unlink()
    if executables.exists(kept) and not executables.is_foreign(path):
        kept.replace(path)
        yield f"put back {path}"
        return
    if executables.is_ours(path):
        path.unlink()
        yield f"removed {path}"
    elif executables.exists(path):
        yield f"left {path}: it is not podfabric's"
    if executables.exists(kept):
        kept.unlink()
        yield f"removed {kept}: {path} is newer"
