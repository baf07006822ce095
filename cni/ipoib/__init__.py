"""The CNI plugin `ipoib`: a child of an IPoIB parent, moved into the pod.

`plugin` is what happens to a pod, in order. `options` reads the network configuration, `parents`
chooses the parent, `child` is the interface itself, `check` compares it.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cni.spec.plugin import Plugin

ABOUT = "podfabric ipoib: gives a pod an IP-over-InfiniBand interface"


def main(script: str = "") -> None:
    """The executable `ipoib`; `script` is the fallback of an installation."""
    from cni.spec.entry import main as serve

    serve(lambda: _load(script), ABOUT)


def _load(script: str) -> "Plugin":
    import os
    import sys

    from cni.installation import paths_of
    from cni.ipoib.plugin import IPoIB

    return IPoIB(paths_of(script, os.environ, sys.argv[1:]))
