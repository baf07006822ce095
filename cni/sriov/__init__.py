"""The CNI plugin `sriov`: a virtual function of an SR-IOV adapter, moved into the pod.

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


def main() -> None:
    """The executable `sriov`."""
    from cni.spec.entry import main as serve

    serve(_load, ABOUT)


def _load() -> "Plugin":
    import os

    from cni.sriov.plugin import Sriov
    from host.paths import Paths

    return Sriov(Paths.from_environ(os.environ))
