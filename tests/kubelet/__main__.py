"""A kubelet for a device plugin to talk to: it says what happens, until it is ended.

    python -m tests.kubelet ROOT [--ask RESOURCE=N]

With --ask one pod is admitted as soon as the resource has N free devices, what it is given is
printed as JSON, and that is all.
"""

import argparse
import json
import signal
import sys
import threading
from pathlib import Path

import msgspec

from tests.kubelet import Kubelet, PodRejected


def main() -> int:
    """Run until SIGINT or SIGTERM, or until the pod that is asked for was admitted."""
    parser = argparse.ArgumentParser(prog="python -m tests.kubelet", description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--ask", metavar="RESOURCE=N")
    parser.add_argument("--wait", type=float, default=30.0, help="seconds for the resource")
    given = parser.parse_args()
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with Kubelet(given.root) as kubelet:
        if given.ask:
            return _ask(kubelet, given.ask, given.wait)
        shown = 0
        while not ended.wait(0.1):
            calls = kubelet.calls[shown:]
            shown += len(calls)
            for call in calls:
                _say(f"{call.method} {call.resource} {' '.join(call.ids)}".rstrip())
    return 0


def _ask(kubelet: Kubelet, ask: str, wait: float) -> int:
    resource, _, count = ask.rpartition("=")
    try:
        kubelet.wait(lambda: kubelet.allocatable(resource) >= int(count), wait)
        pod = kubelet.admit("pod", [{"name": "main", "limits": {resource: int(count)}}])
    except (AssertionError, PodRejected) as error:
        _say(str(error))
        return 1
    _say(json.dumps(msgspec.to_builtins(pod.containers["main"]), indent=2))
    return 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
