"""`podfabric COMMAND`: every command, its example, and the module that runs it.

Imports only the module of the named command, because importing all modules takes too long.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from cli import device_plugin
from cli.arguments import Parser


class Command(NamedTuple):
    """The help of a command, and the function of `module` that adds the arguments.

    The function also sets the default `main`, a function that takes the parsed arguments and
    returns the exit code.
    """

    help: str
    module: str
    add_arguments: str = "add_arguments"


COMMANDS = {
    "ipam": Command("the addresses that pods of this node hold", "cli.ipam"),
    "sweep": Command("remove attachments of dead sandboxes, after a boot or a kill", "cli.sweep"),
    "install": Command("copy the CNI executables to the runtime's directory", "cli.setup.install"),
    "uninstall": Command(
        "remove the executables that `podfabric install` copied",
        "cli.setup.install",
        "add_uninstall_arguments",
    ),
    "status": Command("HCAs, pools, GPUs, attachments and faults at a glance", "cli.show.status"),
    "topo": Command("the distances between GPUs and HCAs, in nvidia-smi's terms", "cli.show.topo"),
    "devices": Command(
        "every HCA, its pools, and the reason if a pool does not offer it", "cli.show.devices"
    ),
    "top": Command(
        "the traffic and errors of each port, and the pods that hold it", "cli.show.top"
    ),
    "explain": Command(
        "the devices and interfaces of a pod, or what differs in a job", "cli.show.explain"
    ),
    "check": Command(
        "test the fabric between nodes with pods, and that partitions are separate",
        "cli.fabric_check.command",
    ),
    "policy": Command(
        "which definitions the rules of a policy allow, before a pod uses them", "cli.policy"
    ),
    "doctor": Command(
        "check this node, and print remedies (exit code 1: a check failed)", "cli.doctor"
    ),
    "agent": Command("serve the launchers of this node until SIGTERM", "cli.agent"),
    "controller": Command(
        "make pools of cluster-wide addresses, and free addresses of dead nodes, until SIGTERM",
        "cli.controller",
    ),
    "device-plugin": Command(
        "offer the HCAs of this node to the kubelet, without the agent, until SIGTERM",
        "cli.device_plugin",
    ),
}


EXAMPLES = {
    "ipam": "podfabric ipam show 10.0.0.5",
    "install": "podfabric install --plugins ipoib,podfabric-ipam",
    "status": "podfabric status --cluster --watch",
    "devices": "podfabric devices --output json",
    "top": "podfabric top --interval 5 --watch",
    "explain": "podfabric explain ml/worker-0",
    "check": "podfabric check --network ml/fabric --resource rdma/hca",
    "policy": "podfabric policy check policies.yaml definition.yaml",
    "controller": "podfabric controller --namespace podfabric",
}


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from agent.observe.metrics import installed_version

        sys.stdout.write(f"podfabric {installed_version()}\n")
        parser.exit()


def run(words: Sequence[str]) -> int:
    if words[:1] == ["device-plugin"]:  # argparse cannot read its flags, which have Go's form
        return device_plugin.run(words[1:])
    parser = Parser(
        prog="podfabric", description="RDMA fabrics for Kubernetes pods: the operator's commands"
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    parsers = parser.add_subparsers(metavar="COMMAND", required=True)
    completing = "_ARGCOMPLETE" in os.environ  # set by the shell's function
    for name, command in COMMANDS.items():
        example = f"example: {EXAMPLES[name]}" if name in EXAMPLES else None
        its_parser = parsers.add_parser(name, help=command.help, epilog=example)
        if words[:1] == [name] or (completing and name != "device-plugin"):
            getattr(importlib.import_module(command.module), command.add_arguments)(its_parser)
    if completing:
        import argcomplete

        argcomplete.autocomplete(parser)
    arguments = parser.parse_args(words)
    try:
        code: int = arguments.main(arguments)
    except PermissionError as error:
        where = f"{error.filename}: " if error.filename else ""
        sys.stderr.write(f"podfabric {words[0]}: {where}{error.strerror}: run it as root\n")
        return 1
    return code
