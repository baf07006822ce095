"""The worker threads: at most the number that is needed, always back in the host's namespace."""

import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from agent.serve import workers as workers_module
from agent.serve.workers import Job, Workers
from host import namespaces
from host.errors import HostError
from host.namespaces import NetworkNamespace
from tests.waiting import PATIENCE, until

IP = "/usr/sbin/ip"


@pytest.fixture
def namespace() -> Iterator[NetworkNamespace]:
    name = f"t{uuid4().hex[:10]}"
    subprocess.run([IP, "netns", "add", name], check=True)
    with NetworkNamespace.open(f"/var/run/netns/{name}") as opened:
        yield opened
    subprocess.run([IP, "netns", "delete", name], check=True)


def submit(workers: Workers, does: Callable[[], object]) -> None:
    workers.submit(Job(lambda job: does()))


def here() -> int:
    return Path("/proc/thread-self/ns/net").stat().st_ino


def test_no_more_threads_than_the_limit_and_than_needed() -> None:
    workers = Workers(3)
    names: set[int] = set()
    lock = threading.Lock()

    def job() -> None:
        with lock:
            names.add(threading.get_ident())

    def job_of_three() -> None:
        job()
        until(lambda: len(names) == 3)

    for _ in range(5):
        submit(workers, job)
        until(lambda: workers.waiting == workers.running == 0)
    assert len(names) == 1
    for _ in range(30):
        submit(workers, job_of_three)
    assert workers.close(PATIENCE)
    assert len(names) == 3


def test_a_job_that_fails_costs_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    workers = Workers(1)

    def fail() -> None:
        raise RuntimeError("boom")

    done = threading.Event()
    submit(workers, fail)
    submit(workers, done.set)
    assert done.wait(PATIENCE)
    assert workers.close(PATIENCE)
    assert "boom" in caplog.text


def test_thread_left_in_a_pod_is_brought_home(namespace: NetworkNamespace) -> None:
    workers = Workers(1)
    seen: list[int] = []

    def stray() -> None:
        namespaces.setns(namespace.descriptor, "entering")
        seen.append(here())

    submit(workers, stray)
    submit(workers, lambda: seen.append(here()))
    assert workers.close(PATIENCE)
    assert seen == [namespace.inode, here()]


def test_thread_that_cannot_come_home_is_replaced(
    namespace: NetworkNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers(1)
    seen: list[tuple[int, int]] = []
    enter = namespaces.setns
    both_submitted = threading.Event()

    def refuse(*_: object) -> None:
        raise HostError("refused")

    def stray() -> None:
        assert both_submitted.wait(PATIENCE)
        enter(namespace.descriptor, "entering")
        monkeypatch.setattr(namespaces, "setns", refuse)
        seen.append((threading.get_ident(), here()))

    submit(workers, stray)
    submit(workers, lambda: seen.append((threading.get_ident(), here())))
    both_submitted.set()
    until(lambda: len(seen) == 1 and workers.threads == 0)
    workers.tend()
    until(lambda: len(seen) == 2)
    assert workers.close(PATIENCE)
    assert [inode for _, inode in seen] == [namespace.inode, here()]


def test_limit_may_change_while_it_runs() -> None:
    workers = Workers(1)
    go_on = threading.Event()
    for _ in range(4):
        submit(workers, lambda: go_on.wait(PATIENCE))
    until(lambda: workers.running == 1 and workers.waiting == 3)
    workers.limit = 4
    workers.tend()
    until(lambda: workers.running == 4)
    go_on.set()
    until(lambda: workers.running == 0)
    workers.limit = 2
    assert workers.close(PATIENCE)


def test_thread_that_cannot_be_started_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(2)
    done = threading.Event()

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        submit(workers, done.set)
    assert workers.waiting == 1
    workers.tend()
    assert done.wait(PATIENCE)
    assert workers.close(PATIENCE)


def test_workers_that_are_stuck_are_replaced_up_to_the_limit_and_no_further() -> None:
    workers = Workers(2)
    let_go = threading.Event()
    for number in range(5):
        workers.submit(Job(lambda job: let_go.wait(PATIENCE), due=0.0))
        until(lambda: workers.running == 4 or workers.waiting == 0)
        workers.tend()
        assert workers.able is (number < 3)
    assert (workers.stuck, workers.waiting, workers.threads) == (4, 1, 4)
    let_go.set()
    until(lambda: workers.running == workers.waiting == 0)
    assert workers.able
    assert workers.close(PATIENCE)


def test_without_a_thread_and_without_a_way_to_start_one_no_job_can_be_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = Workers(2)

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        submit(workers, lambda: None)
    able = [workers.able]
    workers.tend()
    able.append(workers.able)
    assert able == [False, True]
    assert workers.close(PATIENCE)


def test_jobs_that_wait_leave_their_places_to_other_jobs(namespace: NetworkNamespace) -> None:
    """This includes a job that waits in a pod's namespace while the next job's thread starts."""
    workers = Workers(1)
    go_on = threading.Event()
    seen: list[int] = []

    def wait(job: Job) -> None:
        namespaces.setns(namespace.descriptor, "entering")
        with workers.aside(job), workers.aside(job):
            go_on.wait(PATIENCE)
        seen.append(here())

    for _ in range(3):
        workers.submit(Job(wait))
        submit(workers, lambda: seen.append(here()))
    until(lambda: len(seen) == 3)
    assert (workers.running, workers.threads) == (3, 4)
    go_on.set()
    until(lambda: workers.running == 0)
    assert seen == [here()] * 3 + [namespace.inode] * 3
    assert workers.close(PATIENCE)


def test_no_job_begins_while_more_jobs_work_than_there_are_places() -> None:
    workers = Workers(1)
    go_on, end = threading.Event(), threading.Event()
    working: list[int] = []

    def wait(job: Job) -> None:
        with workers.aside(job):
            go_on.wait(PATIENCE)
        working.append(1)
        end.wait(PATIENCE)

    for _ in range(3):
        workers.submit(Job(wait))
    until(lambda: workers.running == 3)
    go_on.set()
    until(lambda: len(working) == 3)
    done = threading.Event()
    submit(workers, done.set)
    workers.tend()
    assert (done.wait(0.1), workers.waiting) == (False, 1)
    end.set()
    assert done.wait(PATIENCE)
    until(lambda: workers.threads == 1)
    assert workers.close(PATIENCE)


def test_threads_that_have_nothing_to_do_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "IDLE_TIME", 0.1)
    workers = Workers(4)
    go_on = threading.Event()
    for _ in range(4):
        submit(workers, lambda: go_on.wait(PATIENCE))
    until(lambda: workers.running == 4)
    go_on.set()
    until(lambda: workers.threads == 0)
    done = threading.Event()
    submit(workers, done.set)
    assert done.wait(PATIENCE)
    assert workers.close(PATIENCE)
