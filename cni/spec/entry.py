"""What a CNI executable runs first. Imports are paid on every call, so this module imports two.

VERSION, and a start by hand without CNI_COMMAND, are answered here. Everything else goes to
`cni.spec.dispatch` with the plugin that `load` returns.
"""

import os
import sys

TYPE_CHECKING = False  # known to type checkers by its name; importing `typing` costs 5 ms
if TYPE_CHECKING:
    from collections.abc import Callable

    from cni.spec.plugin import Plugin

CURRENT_VERSION = "1.1.0"
VERSIONS = ("0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")


def main(load: "Callable[[], Plugin]", about: str) -> None:
    """Serve one CNI call of this process and exit.

    `load` imports and builds the plugin; it is called only for verbs that need one. `about` is
    the line a person sees who starts the executable by hand (CNI reference: skel.PluginMainFuncs).
    """
    command = os.environ.get("CNI_COMMAND", "")
    if command == "VERSION":
        supported = ",".join(f'"{version}"' for version in VERSIONS)
        answer = f'{{"cniVersion":"{CURRENT_VERSION}","supportedVersions":[{supported}]}}\n'
        _write_or_exit(answer.encode())
        sys.exit(0)
    if command == "":
        sys.stderr.write(f"{about}\nCNI protocol versions supported: {', '.join(VERSIONS)}\n")
        sys.exit(0)

    from cni.spec.dispatch import serve

    sys.exit(serve(load))


def _write_or_exit(document: bytes) -> None:
    try:
        os.write(1, document)
    except OSError:  # nobody reads the answer: say so by the exit code, the only channel left
        os._exit(1)
