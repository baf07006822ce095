"""The CNI plugin `ipoib`: a child of an IPoIB parent, moved into the pod.

`options` is what a network configuration may say, `plugin` are the verbs, top to bottom in the
order things happen, `child` is the interface itself: made, compared, removed, found again.
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
    import os

    from cni.ipoib.plugin import IPoIB
    from host.paths import Paths

    return IPoIB(Paths.from_environ(os.environ))
