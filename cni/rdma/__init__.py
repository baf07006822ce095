"""The CNI plugin `rdma`: for definitions that chain it behind `sriov`, as with rdma-cni.

It completes the attachment of `sriov`, whose DEL restores the RDMA devices too. The option
`"rdmaIsolation": true` of `sriov` does the same without a chain.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cni.spec.plugin import Plugin

ABOUT = "podfabric rdma: gives a pod the RDMA device of the VF that sriov gave it"


def main(script: str = "") -> None:
    """The executable `rdma`; `script` is the fallback of an installation."""
    from cni.spec.entry import main as serve

    serve(lambda: _load(script), ABOUT)


def _load(script: str) -> "Plugin":
    import os
    import sys

    from cni.installation import paths_of
    from cni.rdma.plugin import Rdma

    return Rdma(paths_of(script, os.environ, sys.argv[1:]))
