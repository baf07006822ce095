"""How long the calls of other pods take while hostile input arrives without a pause."""

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.attacks.bounds_node import Node, network, node
from tests.plugins import CHECKOUT
from tests.waiting import until

CLIENTS = 4
ROUNDS = 12
ROUND = 3.0  # seconds; every second round has the attacker
MOST = 3.0  # times as long
IPAM = "podfabric-ipam"
CONFIG = network("others", IPAM, ipam={"type": IPAM, "range": "10.7.0.0/16"})


@pytest.mark.early
def test_calls_of_other_pods_take_at_most_three_times_as_long(tmp_path: Path) -> None:
    """The median with and without the attacker: others' load decides the slowest calls.

    Two rounds must pass.
    """
    with node(tmp_path, workers=16) as attacked:
        median(attacked, 1.0)  # so that the agent has imported and opened everything
        ratios = []
        for _ in range(ROUNDS):
            quiet = median(attacked, ROUND)
            with attacking(attacked):
                ratios.append(median(attacked, ROUND) / quiet)
            if sum(ratio <= MOST for ratio in ratios) == 2:
                return
    raise AssertionError(f"the median grew by the factors {ratios}")


def median(attacked: Node, seconds: float) -> float:
    """The median of the times of ADDs and DELs by some clients, for `seconds`."""
    end = time.monotonic() + seconds
    taken: list[float] = []
    lock = threading.Lock()

    def client(number: int) -> None:
        cycle = 0
        while time.monotonic() < end:
            cycle += 1
            for verb in ("ADD", "DEL"):
                answer = attacked.call(IPAM, verb, f"c{number}-{cycle}", CONFIG)
                assert answer.exit_code == 0, answer
                with lock:
                    taken.append(answer.seconds)

    with ThreadPoolExecutor(CLIENTS) as pool:
        for running in [pool.submit(client, number) for number in range(CLIENTS)]:
            running.result()
    return statistics.median(taken)


@contextmanager
def attacking(attacked: Node) -> Iterator[None]:
    """An attacker that has begun."""
    command = [sys.executable, "-m", "tests.attacks.bounds_attacker", str(attacked.service.socket)]
    seen = attacked.service.log.stat().st_size
    with subprocess.Popen(command, cwd=CHECKOUT) as attacker:
        try:
            until(lambda: "attacker" in attacked.service.log.read_text()[seen:])
            yield
            assert attacker.poll() is None
        finally:
            attacker.kill()
