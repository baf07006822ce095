"""`podfabric agent`: starts the agent, or prints its state."""

import argparse
import os
import signal
import sys

from agent import presence
from base.paths import Paths
from cli.arguments import seconds

NOT_PREPARED = ("starting", "stopping")
QUIET = 60.0  # seconds without an attachment, because a runtime may repeat a DEL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state",
        action="store_true",
        help="print the state of this container's agent, and start no agent; exit code 0: it "
        "serves or stands by",
    )
    parser.add_argument(
        "--until-empty",
        nargs="?",
        type=seconds,
        const=QUIET,
        metavar="SECONDS",
        help="leave the node: attach no pod; once the node has had no attachment for SECONDS "
        f"(default: {QUIET:g}), remove launchers and files, and wait for SIGTERM",
    )
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    paths = Paths.from_environ(os.environ)
    if arguments.state:
        states = presence.states(paths.run)
        for state in states or ["no agent runs in this container"]:
            sys.stdout.write(f"{state}\n")
        return 0 if states and not set(states) & set(NOT_PREPARED) else 1
    # Imported here, because a probe runs `--state` every few seconds.
    from agent import resident as agent
    from agent.leave_node import Leaving
    from cli.setup import executables
    from cli.setup.install import uninstall

    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.dup2(2, 1)  # a library's output goes to the log, on standard error
    quiet: float | None = arguments.until_empty
    if quiet is not None:
        return agent.run(paths, leaving=Leaving(quiet, uninstall))
    return agent.run(paths, watch=executables.watch)
