"""`podfabric`: one command for the operator of a node. Each part of podfabric brings its own."""

import argparse
import signal
import sys

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
    ipam.set_defaults(part=ipam_commands.run)
    arguments = parser.parse_args(given)
    code: int = arguments.part(arguments)
    return code
