"""The executable `podfabric-ipam`, for a node without an agent."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cni.spec.plugin import Plugin

ABOUT = "podfabric-ipam: gives pods addresses from ranges, kept on this node"


def main() -> None:
    """The executable `podfabric-ipam`."""
    from cni.spec.entry import main as serve

    serve(_load, ABOUT)


def _load() -> "Plugin":
    from cni import standalone
    from cni.attachments import node_facts
    from cni.policy import cluster
    from ipam.executable import IpamExecutable

    paths = standalone.paths()
    return IpamExecutable(node_facts.addresses_of(paths, cluster.on_node(paths)), paths.locks)
