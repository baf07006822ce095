"""`podfabric ipam hand-back`: a node goes back to nv-ipam's own daemon, with its pods running."""

import argparse

from cli import output
from cli.cluster_addresses import add_kubeconfig
from ipam.cluster.api import ClusterApi
from ipam.cluster.nv_ipam import hand_back


def add_options(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser(
        "hand-back",
        help="give a node an entry in nv-ipam's IPPools again, of addresses that no pod has",
    )
    parser.add_argument("--node", required=True, help="the name of its Node object")
    parser.add_argument(
        "--nv-ipam", required=True, metavar="NAMESPACE", help="of the pools of NVIDIA's nv-ipam"
    )
    parser.add_argument(
        "--leave-cidrpools",
        action="store_true",
        help="you have seen that no pod of the node has an address of a CIDRPool",
    )
    parser.add_argument(
        "--revoke",
        action="store_true",
        help="podfabric serves the node once more, as soon as it has imported the daemon's store",
    )
    add_kubeconfig(parser, "always")
    parser.set_defaults(cluster=True, in_cluster=_run)


def _run(arguments: argparse.Namespace, api: ClusterApi) -> int:
    namespace, node = arguments.nv_ipam, arguments.node
    if arguments.revoke:
        lines = hand_back.revoke(api, namespace, node)
    else:
        left = arguments.leave_cidrpools
        lines = hand_back.hand_back(api, namespace, node, leave_cidrpools=left)
    said = 0
    for line in lines:
        output.show(line)
        said += 1
    if not said:
        output.show(f"there is nothing of {node} in the IPPools of {namespace}")
    return 0
