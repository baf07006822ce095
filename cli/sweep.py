"""`podfabric sweep`: removes attachments of dead sandboxes, as an agent does each minute."""

import argparse
import os
import sys

from base.paths import Paths
from base.text import printable
from cni import interfaces
from cni.attachments import node_facts
from cni.attachments.orphans import sweep_all
from cni.spec.errors import CNIError
from host import procfs
from policy import stored_policies


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        paths = Paths.from_environ(os.environ)
        procfs.use(paths.proc)
        addresses = node_facts.addresses_of(paths, stored_policies.on_node(paths))
        done = sweep_all(addresses, *dict.fromkeys(interfaces.by_executable(paths).values()))
    except CNIError as error:
        sys.stderr.write(f"podfabric sweep: {error}\n")
        return 1
    for line in map(str, done or ["nothing to remove"]):
        sys.stdout.write(f"{printable(line)}\n")
    return 0
