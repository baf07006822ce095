"""`podfabric`: one command for the operator of a node. Each part of podfabric brings its own."""

import argparse
import os
import signal
import sys

from base import memory
from base.paths import Paths
from base.text import printable
from cli import attached, device_plugin, devices, doctor, explain, install, topo
from cni.attachments.removal import sweep_all
from cni.ipoib.plugin import IPoIB
from cni.spec.errors import CNIError
from cni.sriov.plugin import Sriov
from ipam import commands as ipam_commands


def main() -> None:
    """The console script."""
    # `podfabric ipam list | head` ends quietly, as other commands do.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(run(sys.argv[1:]))


def run(given: list[str]) -> int:
    """One command line; the exit code (2 for a wrong one, as argparse has it)."""
    parser = argparse.ArgumentParser(
        prog="podfabric", description="RDMA fabrics for Kubernetes pods: the operator's commands"
    )
    parts = parser.add_subparsers(metavar="PART", required=True)
    ipam = parts.add_parser("ipam", help="the addresses that pods of this node hold")
    ipam_commands.add_commands(ipam)
    ipam.set_defaults(part=_ipam)
    sweep = parts.add_parser(
        "sweep", help="remove what belongs to no living sandbox: once after boot, after kills"
    )
    sweep.set_defaults(part=_sweep)
    install.add_commands(parts)
    for module in (topo, devices, explain, doctor):
        module.add_commands(parts)
    agent = parts.add_parser("agent", help="serve the launchers of this node until SIGTERM")
    agent.set_defaults(part=_agent)
    parts.add_parser(
        "device-plugin",
        help="offer the HCAs of this node to the kubelet, without the agent, until SIGTERM",
        add_help=False,
    )
    if given[:1] == ["device-plugin"]:  # its flags are written as Go's, for whoever comes from it
        return device_plugin.run(given[1:])
    arguments = parser.parse_args(given)
    code: int = arguments.part(arguments)
    return code


def _ipam(arguments: argparse.Namespace) -> int:
    paths = Paths.from_environ(os.environ)
    return ipam_commands.run(arguments, lambda: attached.facts(paths))


def _agent(arguments: argparse.Namespace) -> int:
    memory.allocate_in_glibc()
    from agent.main import run as serve  # which loads all plugins

    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    # What a library prints belongs into the log, on standard error.
    os.dup2(2, 1)
    return serve(Paths.from_environ(os.environ))


def _sweep(arguments: argparse.Namespace) -> int:
    try:
        paths = Paths.from_environ(os.environ)
        done = sweep_all(IPoIB(paths).sweep, Sriov(paths).sweep)
    except CNIError as error:
        sys.stderr.write(f"podfabric sweep: {error}\n")
        return 1
    for line in done or ["nothing to remove"]:
        sys.stdout.write(f"{printable(line)}\n")
    return 0
