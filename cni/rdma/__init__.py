"""The CNI plugin `rdma`: for definitions that chain it behind `sriov`, as with rdma-cni.

It completes the attachment of `sriov`, whose DEL restores the RDMA devices too. The option
`"rdmaIsolation": true` of `sriov` does the same without a chain.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cni.spec.plugin import Plugin

ABOUT = "podfabric rdma: gives a pod the RDMA device of the VF that sriov gave it"


def main() -> None:
    """The executable `rdma`."""
    from cni.spec.entry import main as serve

    serve(_load, ABOUT)


def _load() -> "Plugin":
    from cni import standalone
    from cni.rdma.plugin import Rdma

    return Rdma(standalone.paths())
