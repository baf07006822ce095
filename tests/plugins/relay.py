"""Agents that take over from each other. They are forked from a process that has imported
everything, so each starts quickly.

`python -m tests.plugins.relay` forks an agent for each line of standard input and prints its pid.
It exits at the end of standard input.
"""

import os
import signal
import sys

from base.paths import Paths
from bench import moved


def main() -> int:
    """Fork agents."""
    paths = Paths.from_environ(os.environ)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a dead agent leaves no zombie
    while sys.stdin.readline():
        child = os.fork()
        if child == 0:
            os._exit(_run(paths))
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()
    return 0


def _run(paths: Paths) -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(2, 1)
    try:
        return moved.run(paths)
    finally:
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
