"""`podfabric-ipam` and `podfabric ipam` as processes, with a separate state directory."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from base import locks
from base.locks import Busy
from base.paths import Paths
from tests.runtime import CHECKOUT, CNI_BIN, Outcome, Runtime
from tests.waiting import PATIENCE

EXECUTABLE = "podfabric-ipam"
CONFIG = {
    "cniVersion": "1.1.0",
    "name": "n1",
    "type": EXECUTABLE,
    "ipam": {"type": EXECUTABLE, "range": "10.0.0.0/16", "gateway": "10.0.0.1"},
}
PROCESSES, EACH = 40, 10


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def runtime(state: Path) -> Runtime:
    built = (CNI_BIN / EXECUTABLE).exists()
    return Runtime(
        bin_dir=CNI_BIN if built else Path(sys.executable).parent,
        environ={"PATH": os.environ["PATH"], "PODFABRIC_STATE": str(state)},
    )


def add(
    runtime: Runtime, container_id: str, config: Mapping[str, object] = CONFIG, args: str = ""
) -> Outcome:
    return runtime.call("ADD", config, container_id=container_id, netns="/none", args=args)


def delete(runtime: Runtime, container_id: str) -> Outcome:
    return runtime.call("DEL", CONFIG, container_id=container_id)


def address_of(outcome: Outcome) -> str:
    assert outcome.exit_code == 0, outcome
    (ip,) = outcome.document["ips"]
    address = ip["address"]
    assert isinstance(address, str)
    return address


def podfabric(runtime: Runtime, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("podfabric"), "ipam", *words],
        env=runtime.environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_400_adds_in_40_processes_at_once_are_all_given_an_address_of_their_own(
    runtime: Runtime,
) -> None:
    def worker(number: int) -> list[str]:
        return [address_of(add(runtime, f"c{number}-{call}")) for call in range(EACH)]

    with ThreadPoolExecutor(PROCESSES) as pool:
        given = [address for some in pool.map(worker, range(PROCESSES)) for address in some]
    assert len(given) == PROCESSES * EACH
    assert len(set(given)) == PROCESSES * EACH
    # the lowest ones, without a hole, and never the gateway
    expected = {f"10.0.{n // 256}.{n % 256}/16" for n in range(2, PROCESSES * EACH + 2)}
    assert set(given) == expected


def test_executable_does_nothing_where_an_agent_owns_the_state(
    runtime: Runtime, state: Path
) -> None:
    given = address_of(add(runtime, "c1"))
    lock = locks.locked(Paths(state=state).agent_lock, "the agent", keep=True)
    with lock:
        for command in ("ADD", "DEL", "CHECK", "GC", "STATUS"):
            refused = runtime.call(command, CONFIG, container_id="c1", netns="/none")
            assert (refused.exit_code, refused.document["code"]) == (1, 114)
            assert "`podfabric install`" in refused.document["msg"]
        assert runtime.call("VERSION", CONFIG).exit_code == 0
        assert given.split("/")[0] in podfabric(runtime, "list").stdout
    assert delete(runtime, "c1").exit_code == 0


def test_agent_waits_for_a_running_executable_and_another_executable_does_not(
    runtime: Runtime, state: Path
) -> None:
    lock = locks.locked(Paths(state=state).agent_lock, "the agent", timeout=0.0, keep=True)
    with lock:
        pass  # an agent has served here
    waits = "from cni import standalone; standalone.paths(); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", waits],
        env={**runtime.environ, "PYTHONPATH": str(CHECKOUT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline()
        with pytest.raises(Busy), lock:
            pass
        assert add(runtime, "c1").exit_code == 0
        running.kill()
    with lock:
        pass


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_adds_leak_no_address(runtime: Runtime, state: Path, number: signal.Signals) -> None:
    environ = {
        **runtime.environ,
        "CNI_COMMAND": "ADD",
        "CNI_NETNS": "/none",
        "CNI_IFNAME": "net1",
        "CNI_PATH": "/none",
    }
    for attempt in range(12):
        process = subprocess.Popen(
            [runtime.bin_dir / EXECUTABLE],
            env={**environ, "CNI_CONTAINERID": f"k{attempt}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(CONFIG).encode())
        process.stdin.close()
        time.sleep(0.01 * attempt)
        process.send_signal(number)
        process.wait()
        assert delete(runtime, f"k{attempt}").exit_code == 0
    assert podfabric(runtime, "list", "-o", "json").stdout == "[]\n"
    assert podfabric(runtime, "fsck").returncode == 0
    assert address_of(add(runtime, "c1")) == "10.0.0.2/16"
