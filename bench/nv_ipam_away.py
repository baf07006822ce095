"""podfabric in nv-ipam's place while the API server is away: `python -m bench.nv_ipam_away`.

A node that serves nv-ipam's pools adds and removes pods, each call a process, as a runtime starts
them. The API server stops meanwhile, and the agent is killed again and again. No call may fail. As
root, after `make cni`.
"""

import argparse
import json
import tempfile
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from bench.agent import Agent
from bench.nv_ipam import POOL, Side, answers, pair, serve_pools, start_agent
from bench.processes import quantile
from tests.api.server import api_server
from tests.waiting import join, until

BEFORE = 60.0  # seconds of calls while the API server answers


class Churn:
    """ADD and DEL of one pod after the other in a thread, until `close`."""

    def __init__(self, side: Side) -> None:
        self.seconds: list[tuple[float, float]] = []  # when an ADD began, and how long it took
        self._side = side
        self._failure: SystemExit | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="churn")
        self._thread.start()

    def close(self) -> None:
        """SystemExit: a call failed."""
        self._closed.set()
        join(self._thread)
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while not self._closed.wait(0.05):
            began = time.monotonic()
            try:
                self.seconds.append((began, pair(self._side, len(self.seconds)).added))
            except SystemExit as failure:
                self._failure = failure
                return


def main() -> None:
    """Print what the calls took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="without the API server")
    parser.add_argument("--kills", type=int, default=20, help="of the agent, meanwhile")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        directory = tempfile.TemporaryDirectory(prefix="podfabric-bench-", dir="/var/tmp")
        root = Path(stack.enter_context(directory))
        server = stack.enter_context(api_server())
        serve_pools(server)
        agent = stack.enter_context(start_agent(server, root))
        keys = {"type": "nv-ipam", "poolName": POOL}
        definition = {"cniVersion": "1.0.0", "name": "net", "type": "macvlan", "ipam": keys}
        socket = {"PODFABRIC_SOCKET": str(agent.socket)}
        side = Side(agent.executables / "nv-ipam", json.dumps(definition).encode(), socket)
        until(partial(answers, side), what="an answer of the agent")
        measure("the API server answers", side, agent, BEFORE, 0)
        server.plane.stop_api_server()
        measure("it is away", side, agent, arguments.seconds, arguments.kills)
        server.plane.start_api_server()
        measure("it is back", side, agent, BEFORE, 0)


def measure(when: str, side: Side, agent: Agent, seconds: float, kills: int) -> None:
    """Calls for a while, in which the agent is killed at equal distances."""
    churn = Churn(side)
    killed: list[float] = []
    for _ in range(kills):
        time.sleep(seconds / (kills + 1))
        killed.append(time.monotonic())
        agent.kill()
    time.sleep(seconds / (kills + 1))
    churn.close()
    # An agent needs some seconds to start here, and a call waits for it.
    waited = [took for began, took in churn.seconds if _meets(began, took, killed)]
    others = [took for began, took in churn.seconds if not _meets(began, took, killed)]
    p50, p99 = (quantile(others, part) * 1e3 for part in (0.5, 0.99))
    print(
        f"{when}: {len(churn.seconds)} ADDs, none failed; p50 {p50:.1f} ms, p99 {p99:.1f} ms; "
        f"{kills} kills of the agent, {len(waited)} ADDs near one, at most "
        f"{max(waited, default=0.0):.1f} s",
        flush=True,
    )


def _meets(began: float, took: float, killed: list[float]) -> bool:
    return any(began <= at <= began + took or 0 <= began - at < 5.0 for at in killed)


if __name__ == "__main__":
    main()
