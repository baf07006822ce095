"""`podfabric agent`."""

import argparse
import os
import signal

from agent import main as agent
from base.paths import Paths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options of its own."""
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM; the exit code."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.dup2(2, 1)  # what a library prints belongs into the log, on standard error
    return agent.run(Paths.from_environ(os.environ))
