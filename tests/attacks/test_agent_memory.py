"""Storms of large configurations: the agent's memory stays below a bound, and shrinks
afterwards."""

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.attacks.agent_clients import Caller
from tests.plugins.service import Service, install_launchers
from tests.waiting import until

SIZE = 500_000  # bytes of a configuration
CLIENTS = 64
BURSTS = 4
MOST = 15.0  # MiB above the level before the storm
PEAK = 110.0  # MiB at any moment of the storm
GLIBC = {"PYTHONMALLOC": "malloc", "MALLOC_ARENA_MAX": "2"}  # as in the unit file

PLUGINS = {
    "podfabric-ipam": b"",
    "ipoib": b',"master":"ib0"',
    "sriov": b',"deviceID":"0000:00:00.0"',
}


def filled(item: bytes, size: int = SIZE) -> bytes:
    return b",".join([item] * (size // (len(item) + 1)))


def keys(size: int = SIZE) -> bytes:
    return b",".join(b'"key%d":%d' % (number, number) for number in range(size // 18))


SHAPES = {
    "a long string": b'"x":"' + b"a" * SIZE + b'"',
    "a long string that is not ASCII": b'"x":"' + "\u20ac\U0001f600".encode() * (SIZE // 7) + b'"',
    "a long escaped string": b'"x":"' + b"\\u20ac" * (SIZE // 6) + b'"',
    "many keys": keys(),
    "many keys of args": b'"args":{"cni":{' + keys() + b"}}",
    "many routes": b'"routes":[' + filled(b'{"dst":"10.0.0.0/8"}') + b"]",
    "a long list": b'"x":[' + filled(b"1234567") + b"]",
    "many lists": b'"x":[' + filled(b"[[[]]]") + b"]",
    "deep lists": b'"x":' + b"[" * (SIZE // 2) + b"]" * (SIZE // 2),
    "as deep as can be read": b'"x":[' + filled(b"[" * 900 + b"]" * 900) + b"]",
}


@pytest.fixture
def caller(tmp_path: Path) -> Iterator[Caller]:
    install_launchers(tmp_path / "bin", list(PLUGINS))
    podfabric = Path(sys.executable).with_name("podfabric")
    service = Service(tmp_path / "agent", environ=GLIBC, command=[str(podfabric), "agent"])
    service.wait_until_ready()
    yield Caller(service, tmp_path / "bin", tmp_path / "state")
    service.stop()


def memory(pid: int) -> float:
    """Resident memory in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def configuration(plugin: str, shape: bytes, ipam: bytes = b"") -> bytes:
    return (
        b'{"cniVersion":"1.0.0","name":"n","type":"%b"%b,"ipam":{"type":"podfabric-ipam",'
        b'"range":"10.0.0.0/16"%b},%b}' % (plugin.encode(), PLUGINS[plugin], ipam, shape)
    )


def test_too_large_configuration_is_refused_with_the_limit_and_can_be_removed(
    caller: Caller,
) -> None:
    config = configuration("podfabric-ipam", b'"x":"' + b"a" * (2 << 20) + b'"')
    done = caller.launch("podfabric-ipam", "ADD", "c1", config)
    document = json.loads(done.stdout)
    assert (done.returncode, document["code"]) == (1, 7)
    for part in (f"{len(config)} bytes", "at most 1048576", "agent.max_config_bytes"):
        assert part in document["msg"]
    assert caller.launch("podfabric-ipam", "DEL", "c1", config).returncode == 0


def test_memory_goes_back_after_a_storm(caller: Caller) -> None:
    pid = caller.service.process.pid
    calls = [
        (plugin, verb, configuration(plugin, shape))
        for shape, plugin, verb in itertools.product(SHAPES.values(), PLUGINS, ("ADD", "DEL"))
    ]
    calls += [
        ("podfabric-ipam", "ADD", configuration("podfabric-ipam", b'"a":0', ipam))
        for ipam in (
            b',"exclude":[' + filled(b'"10.0.0.9"') + b"]",
            b',"ranges":[[' + filled(b'{"subnet":"10.1.0.0/16"}') + b"]]",
            b',"addresses":[' + filled(b'{"address":"10.0.0.9/16"}') + b"]",
        )
    ]
    for number in range(CLIENTS):  # everything that is made only once exists by now
        plugin = list(PLUGINS)[number % len(PLUGINS)]
        for verb in ("ADD", "DEL"):
            caller.ask(plugin, verb, f"c{number}", configuration(plugin, b'"x":0'))
    before = memory(pid)

    peak = 0.0
    over = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.is_set():
            peak = max(peak, memory(pid))
            time.sleep(0.02)

    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        watching = pool.submit(watch)
        try:
            for burst in range(BURSTS):
                chosen = itertools.islice(itertools.cycle(calls), 16 * burst, 16 * burst + CLIENTS)
                replies = [
                    pool.submit(caller.ask, plugin, verb, f"c{number}", config)
                    for number, (plugin, verb, config) in enumerate(chosen)
                ]
                for reply in replies:
                    reply.result()
        finally:
            over.set()
        watching.result()

    until(lambda: memory(pid) < before + MOST)
    assert peak < PEAK
