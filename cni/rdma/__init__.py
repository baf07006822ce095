"""The CNI plugin `rdma`: for definitions that chain it behind `sriov`, as with rdma-cni.

It completes the attachment that `sriov` has made, whose DEL brings the RDMA devices home with the
rest. `"rdmaIsolation": true` says the same without a chain.
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
    import os

    from cni.rdma.plugin import Rdma
    from host.paths import Paths

    return Rdma(Paths.from_environ(os.environ))
