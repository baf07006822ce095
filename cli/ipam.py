"""`podfabric ipam`: the store's commands, with what else the node knows of addresses."""

import argparse
import os

from base.paths import Paths
from cli import cluster_addresses
from cni.attachments import node_facts
from ipam import commands


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommands with their options."""
    subcommands = commands.add_commands(parser)
    cluster_addresses.add_options(subcommands)
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    """Run a subcommand; the exit code."""
    if getattr(arguments, "cluster", False):
        return cluster_addresses.run(arguments)
    paths = Paths.from_environ(os.environ)
    return commands.run(arguments, lambda: node_facts.look(paths))
