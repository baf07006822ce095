"""The threads: as many as needed, always home again."""

import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from agent.workers import Workers
from host import namespaces
from host.errors import HostError
from host.namespaces import NetworkNamespace
from tests.host.agent.serving import until

IP = "/usr/sbin/ip"


@pytest.fixture
def namespace() -> Iterator[NetworkNamespace]:
    name = f"t{uuid4().hex[:10]}"
    subprocess.run([IP, "netns", "add", name], check=True)
    with NetworkNamespace.open(f"/var/run/netns/{name}") as opened:
        yield opened
    subprocess.run([IP, "netns", "delete", name], check=True)


def here() -> int:
    return Path("/proc/thread-self/ns/net").stat().st_ino


def test_no_more_threads_than_the_limit_and_than_needed() -> None:
    workers = Workers(3)
    names: set[int] = set()
    lock = threading.Lock()

    def job() -> None:
        with lock:
            names.add(threading.get_ident())
        time.sleep(0.01)

    for _ in range(5):
        workers.submit(job)
        until(lambda: workers.waiting == workers.running == 0)
    assert len(names) == 1
    for _ in range(30):
        workers.submit(job)
    assert workers.close(10)
    assert len(names) == 3


def test_a_job_that_fails_costs_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    workers = Workers(1)

    def fail() -> None:
        raise RuntimeError("boom")

    done = threading.Event()
    workers.submit(fail)
    workers.submit(done.set)
    assert done.wait(5)
    assert workers.close(5)
    assert "boom" in caplog.text


def test_thread_left_in_a_pod_is_brought_home(namespace: NetworkNamespace) -> None:
    workers = Workers(1)
    seen: list[int] = []

    def stray() -> None:
        namespaces._setns(namespace.descriptor, "entering")
        seen.append(here())

    workers.submit(stray)
    workers.submit(lambda: seen.append(here()))
    assert workers.close(5)
    assert seen == [namespace.inode, here()]


def test_thread_that_cannot_come_home_is_replaced(
    namespace: NetworkNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers(1)
    seen: list[tuple[int, int]] = []
    enter = namespaces._setns

    def refuse(*_: object) -> None:
        raise HostError("refused")

    def stray() -> None:
        enter(namespace.descriptor, "entering")
        monkeypatch.setattr(namespaces, "_setns", refuse)
        seen.append((threading.get_ident(), here()))

    workers.submit(stray)
    workers.submit(lambda: seen.append((threading.get_ident(), here())))
    until(lambda: workers.running == 0)
    workers.tend()
    until(lambda: len(seen) == 2)
    assert workers.close(5)
    assert [inode for _, inode in seen] == [namespace.inode, here()]


def test_limit_may_change_while_it_runs() -> None:
    workers = Workers(1)
    go_on = threading.Event()
    for _ in range(4):
        workers.submit(lambda: go_on.wait(10))
    until(lambda: workers.running == 1 and workers.waiting == 3)
    workers.limit = 4
    workers.tend()
    until(lambda: workers.running == 4)
    go_on.set()
    until(lambda: workers.running == 0)
    workers.limit = 2
    assert workers.close(5)


def test_thread_that_cannot_be_started_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(2)
    done = threading.Event()

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        workers.submit(done.set)
    assert workers.waiting == 1
    workers.tend()
    assert done.wait(5)
    assert workers.close(5)
