"""Checks of a container runtime's files: Multus and podfabric's executables."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from base import decoding
from cli.checks import Outcome, failed, ok, warning
from cli.setup import executables
from cli.setup.executables import INSTALLED, RETURNED, TAKE_AGAIN
from node.state import ThisNode

_SUFFIXES = (".conf", ".conflist", ".json")  # of the files that a runtime reads (libcni)
_MULTUS = ("multus", "multus-shim")


class _ListedPlugin(msgspec.Struct):
    type: str = ""


class _NetworkList(msgspec.Struct):
    type: str = ""
    plugins: list[_ListedPlugin] = []


def multus(node: ThisNode) -> Iterator[Outcome]:
    """Check that the runtime's first configuration is Multus, which calls podfabric's plugins."""
    directory = node.paths.cni_conf
    files = _files(directory)
    if not files:
        yield failed(
            f"{directory}: no CNI configuration",
            "install the cluster's network and Multus, or set PODFABRIC_CNI_CONF to the runtime's "
            "directory",
        )
        return
    by_multus = [path for path in files if set(_types(path)) & set(_MULTUS)]
    installed = [name for name in _MULTUS if (node.paths.cni_bin / name).exists()]
    if not by_multus:
        yield warning(
            f"{directory}: no configuration has the type multus: pods get only the interface of "
            f"{files[0].name}",
            "install Multus, unless another program calls the plugins",
        )
    elif files[0] not in by_multus:
        yield failed(
            f"the runtime uses the first file, {files[0].name}, and not {by_multus[0].name}",
            f"give Multus' file a name that sorts first: 00-multus.conf in {directory}",
        )
    elif not installed:
        yield failed(
            f"{by_multus[0].name} needs an executable that is not in {node.paths.cni_bin}",
            "does Multus' pod run on this node?",
        )
    else:
        yield ok(f"{by_multus[0].name}, {', '.join(installed)}")


def our_executables(node: ThisNode) -> Iterator[Outcome]:
    directory = node.paths.cni_bin
    missing, foreign = [], []
    for name in executables.PLUGINS:
        if not (directory / name).exists():
            missing.append(name)
        elif not executables.is_ours(directory / name):
            foreign.append(name)
    returned = [name for name in INSTALLED if executables.has_returned(directory / name)]
    foreign = [name for name in foreign if name not in returned]
    remedy = (
        "restart podfabric's pod of this node, unless `install.plugins` leaves them out; without "
        f"Kubernetes: `podfabric install --bin-dir {directory}`"
    )
    if returned:
        yield failed(f"{directory}: {', '.join(returned)}: {RETURNED}", TAKE_AGAIN)
    if missing:
        yield failed(f"{directory} lacks {', '.join(missing)}", remedy)
    if foreign:
        yield warning(f"{directory}: not podfabric's: {', '.join(foreign)}", remedy)
    if not missing and not foreign and not returned:
        yield ok(f"{directory}: {', '.join(executables.PLUGINS)}")


def _files(directory: Path) -> list[Path]:
    try:
        return sorted(path for path in directory.iterdir() if path.suffix in _SUFFIXES)
    except OSError:
        return []


def _types(path: Path) -> list[str]:
    try:
        network = decoding.decode(path.read_bytes(), _NetworkList)
    except (OSError, msgspec.MsgspecError):
        return []
    return [network.type, *(plugin.type for plugin in network.plugins)]
