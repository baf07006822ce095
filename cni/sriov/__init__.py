"""The CNI plugin `sriov`: a virtual function of an SR-IOV HCA, moved into the pod.

`options` is what a network configuration may say, of `values` that are looked at one by one;
`plugin` are the verbs. `devices` is which one an attachment gets, `plan` what that is now and
whether it will do; neither changes anything. `settings` is what the PF sets for its VF, `interface`
the way into the pod, with `verbs` (RDMA devices), `soft` (Soft-RoCE) and `guids` (InfiniBand's,
which take a `binding` of the driver); `record` is what the journal keeps of it. `removal` gives a
device back from that record, `unrecorded` without one; `check` compares.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cni.spec.plugin import Plugin

ABOUT = "podfabric sriov: moves an SR-IOV virtual function into a pod"


def main(script: str = "") -> None:
    """The executable `sriov`; `script` is the fallback of an installation."""
    from cni.spec.entry import main as serve

    serve(lambda: _load(script), ABOUT)


def _load(script: str) -> "Plugin":
    import os
    import sys

    from cni.installation import paths_of
    from cni.sriov.plugin import Sriov

    return Sriov(paths_of(script, os.environ, sys.argv[1:]))
