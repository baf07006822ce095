"""The console script `podfabric`. The commands are in `cli.commands`."""

import gc
import signal
import sys


def main() -> None:
    """Run the command line and exit with its code."""
    if sys.argv[1:2] == ["agent"]:
        gc.disable()  # imports leave little garbage; the agent enables the collector when it serves
    from cli.commands import run

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `podfabric ipam list | head` ends quietly
    sys.exit(run(sys.argv[1:]))
