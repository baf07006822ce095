"""The CNI plugin `ipoib`: a child of an IPoIB parent, moved into the pod.

`plugin` is what happens to a pod, in order. `options` reads the network configuration, `parents`
chooses the parent, `child` is the interface itself, `check` compares it.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cni.spec.plugin import Plugin

ABOUT = "podfabric ipoib: gives a pod an IP-over-InfiniBand interface"


def main() -> None:
    """The executable `ipoib`."""
    from cni.spec.entry import main as serve

    serve(_load, ABOUT)


def _load() -> "Plugin":
    from cni import standalone
    from cni.ipoib.plugin import IPoIB

    return IPoIB(standalone.paths())
