"""A tenant whose network uses a foreign IPAM executable does not disturb other tenants' calls."""

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.attacks.agent_clients import Caller, Tally, network
from tests.plugins.service import Service, install_launchers

CALLS = 5000
CLIENTS = 14  # over the socket
LAUNCHING = 2  # through real launchers
FOREIGN = 4  # each of their calls starts an executable

EXECUTABLE = """\
#!/bin/sh
[ "$CNI_COMMAND" = ADD ] && echo '{"cniVersion": "1.0.0", "ips": [{"address": "10.8.0.1/24"}]}'
exit 0
"""


@pytest.fixture
def caller(tmp_path: Path) -> Iterator[Caller]:
    bin_dir = tmp_path / "bin"
    install_launchers(bin_dir, ["noop"])
    foreign = bin_dir / "foreign"
    foreign.write_text(EXECUTABLE)
    foreign.chmod(0o755)
    service = Service(tmp_path / "agent")
    service.wait_until_ready()
    yield Caller(service, bin_dir, tmp_path / "state")
    service.stop()


def test_executables_that_are_started_all_the_time_break_no_other_call(caller: Caller) -> None:
    """Between fork and exec, the children hold a copy of every connection of the agent."""
    good = network("good", "noop")
    delegating = network("foreign", "noop", ipam={"type": "foreign"})
    others, foreign = Tally(), Tally()
    numbers = itertools.count(1)
    over = threading.Event()

    def call() -> None:
        while next(numbers) <= CALLS:
            try:
                reply = caller.ask("noop", "CHECK", "c", good)
            except (OSError, EOFError) as error:
                others.count(f"{type(error).__name__}: {error}")
            else:
                others.count("" if reply.exit_code == 0 else f"answer: {reply.stdout!r}")

    def launch() -> None:
        while next(numbers) <= CALLS:
            done = caller.launch("noop", "CHECK", "c", good)
            others.count("" if done.returncode == 0 else f"launcher: {done.stdout!r}")

    def delegate(number: int) -> None:
        while not over.is_set():
            for verb in ("ADD", "DEL"):
                try:
                    reply = caller.ask("noop", verb, f"f{number}", delegating)
                except (OSError, EOFError) as error:
                    foreign.count(f"{verb}: {type(error).__name__}: {error}")
                else:
                    foreign.count("" if reply.exit_code == 0 else f"{verb}: {reply.stdout!r}")

    with ThreadPoolExecutor(CLIENTS + LAUNCHING + FOREIGN) as pool:
        delegating_clients = [pool.submit(delegate, number) for number in range(FOREIGN)]
        clients = [pool.submit(call) for _ in range(CLIENTS)]
        clients += [pool.submit(launch) for _ in range(LAUNCHING)]
        try:
            for future in clients:
                future.result()
        finally:
            over.set()
        for future in delegating_clients:
            future.result()

    assert others.broken == []
    assert others.answered == CALLS
    assert foreign.broken == []
    assert foreign.answered > 20
