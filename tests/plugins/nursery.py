"""An agent that dies often. It is forked from a process that has imported everything, so that the
next one starts quickly.

`python -m tests.plugins.nursery` keeps one child running and writes its pid to `<run>/agent.pid`.
On SIGTERM it ends the child and itself.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from base.paths import Paths
from bench import moved


def main() -> int:
    """Fork agents until SIGTERM."""
    paths = Paths.from_environ(os.environ)
    paths.run.mkdir(parents=True, exist_ok=True)
    pid_file = paths.run / "agent.pid"
    child = 0
    stopping = False

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)

    # SIGTERM is allowed only while there is a child that it ends. Otherwise a SIGTERM between the
    # check of `stopping` and the fork would end none, and the next child would live on.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGTERM, stop)
    while not stopping:
        child = os.fork()
        if child == 0:
            os._exit(_run(paths))
        _write(pid_file, child)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.waitpid(child, 0)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    return 0


def _run(paths: Paths) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        return moved.run(paths)
    finally:
        sys.stderr.flush()


def _write(path: Path, pid: int) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(str(pid))
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
