"""Starts a CNI executable. Imports cost time in every call, so this module has only two.

Answers VERSION, and a start without CNI_COMMAND. `cni.spec.dispatch` answers all other commands.
"""

import os
import sys

TYPE_CHECKING = False  # type checkers know the name; importing `typing` costs 5 ms
if TYPE_CHECKING:
    from collections.abc import Callable

    from cni.spec.plugin import Plugin

CURRENT_VERSION = "1.1.0"
VERSIONS = ("0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")


def main(load: "Callable[[], Plugin]", about: str) -> None:
    """Serve one CNI call of this process and exit. `load` imports and builds the plugin.

    Without CNI_COMMAND prints `about` (CNI reference: skel.PluginMainFuncs).
    """
    command = os.environ.get("CNI_COMMAND", "")
    if command == "VERSION":
        supported = ",".join(f'"{version}"' for version in VERSIONS)
        answer = f'{{"cniVersion":"{CURRENT_VERSION}","supportedVersions":[{supported}]}}\n'
        try:
            os.write(1, answer.encode())
        except OSError:  # the reader has gone: only the exit code is left
            os._exit(1)
        sys.exit(0)
    if command == "":
        sys.stderr.write(f"{about}\nCNI protocol versions supported: {', '.join(VERSIONS)}\n")
        sys.exit(0)

    from cni.spec.dispatch import serve

    sys.exit(serve(load))
