"""Runs the plugins as executables, without an agent.

Each executable holds a shared lock on `Paths.agent_lock` until its process ends. An agent needs the
exclusive lock, so a starting agent waits for running calls.

Imports are slow, so an executable imports its plugin only for verbs that need the plugin.
"""

from cni.spec.entry import main as serve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from base.paths import Paths
    from cni.spec.plugin import Plugin


def ipoib() -> None:
    def load() -> "Plugin":
        from cni.ipoib.plugin import IPoIB

        return IPoIB(paths())

    serve(load, "podfabric ipoib: gives a pod an IP-over-InfiniBand interface")


def sriov() -> None:
    def load() -> "Plugin":
        from cni.sriov.plugin import Sriov

        return Sriov(paths())

    serve(load, "podfabric sriov: moves an SR-IOV virtual function into a pod")


def macvlan() -> None:
    def load() -> "Plugin":
        from cni.macvlan.plugin import Macvlan

        return Macvlan(paths())

    serve(load, "podfabric macvlan: gives a pod a macvlan interface on its RoCE HCA")


def ipvlan() -> None:
    def load() -> "Plugin":
        from cni.macvlan.plugin import Ipvlan

        return Ipvlan(paths())

    serve(load, "podfabric ipvlan: gives a pod an ipvlan interface on its RoCE HCA")


def rdma() -> None:
    def load() -> "Plugin":
        from cni.rdma.plugin import Rdma

        return Rdma(paths())

    serve(load, "podfabric rdma: gives a pod the RDMA device of the VF that sriov gave it")


def ipam() -> None:
    def load() -> "Plugin":
        from cni.attachments import node_facts
        from ipam.plugin import IpamExecutable
        from policy import stored_policies

        node = paths()
        return IpamExecutable(
            node_facts.addresses_of(node, stored_policies.on_node(node)), node.locks
        )

    serve(load, "podfabric-ipam: gives pods addresses from ranges, kept on this node")


def paths() -> "Paths":
    """The node's files. Raises CNIError 114 if an agent owns the files, 5 if the lock fails."""
    import os

    from base import locks
    from base.paths import Paths
    from cni.spec.errors import CNIError, Code

    node = Paths.from_environ(os.environ)
    try:
        locks.shared(node.agent_lock)  # until the process ends
    except (FileNotFoundError, NotADirectoryError):
        pass  # no agent has served here
    except locks.Busy:
        raise CNIError(
            Code.AGENT_OWNS,
            f"podfabric's agent holds {node.agent_lock} and alone changes {node.state}, so this "
            "plugin did nothing: run `podfabric install`, which installs a launcher that calls "
            "the agent, or stop the agent",
        ) from None
    except OSError as error:
        raise CNIError(
            Code.IO_FAILURE,
            f"cannot lock {node.agent_lock}: {error.strerror}: run this executable as root",
        ) from None
    return node
