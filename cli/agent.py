"""`podfabric agent`."""

import argparse
import os
import signal
import sys

from agent import presence
from base.paths import Paths
from cli.arguments import seconds

NOT_PREPARED = ("starting", "stopping")
QUIET = 60.0  # seconds without an attachment: a runtime may repeat a DEL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state",
        action="store_true",
        help="start no agent: print the state of this container's agent, and exit with 0 if it "
        "serves or is prepared to",
    )
    parser.add_argument(
        "--until-empty",
        nargs="?",
        type=seconds,
        const=QUIET,
        metavar="SECONDS",
        help="leave the node: attach nothing, detach until the node has had no attachment for "
        f"that long (default: {QUIET:g}), remove launchers and files, wait for SIGTERM",
    )
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    paths = Paths.from_environ(os.environ)
    if arguments.state:
        states = presence.states(paths.run)
        for state in states or ["no agent runs with the mounts of this process"]:
            sys.stdout.write(f"{state}\n")
        return 0 if states and not set(states) & set(NOT_PREPARED) else 1
    # A probe asks for the state every few seconds and needs none of these.
    from agent import resident as agent
    from agent.leave_node import Leaving
    from cli.setup import executables
    from cli.setup.install import uninstall

    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.dup2(2, 1)  # a library's output belongs into the log, on standard error
    quiet: float | None = arguments.until_empty
    if quiet is not None:
        return agent.run(paths, leaving=Leaving(quiet, uninstall))
    return agent.run(paths, watch=executables.watch)
