"""The client of the kubelet's PodResources: one connection for many calls, a new one per
kubelet."""

import select
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import grpc
import pytest

from base.paths import Paths
from deviceplugin.kubelet.pod_resources import PodResourcesClient
from deviceplugin.kubelet.records import KubeletUnreadable
from tests.kubelet import Kubelet
from tests.waiting import PATIENCE, until


@pytest.fixture
def connection(root: Path) -> Iterator[PodResourcesClient]:
    with closing(PodResourcesClient(Paths(kubelet=root))) as connection:
        yield connection


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> list[grpc.Channel]:
    """The channels that were made to the kubelet."""
    made: list[grpc.Channel] = []
    original = grpc.insecure_channel

    def make(target: str, options: Sequence[tuple[str, int | str]]) -> grpc.Channel:
        made.append(original(target, options))
        return made[-1]

    monkeypatch.setattr("grpc.insecure_channel", make)
    return made


def test_connection_is_kept_while_the_kubelet_stays(
    kubelet: Kubelet, connection: PodResourcesClient, channels: list[grpc.Channel]
) -> None:
    kubelet.start()
    for _ in range(3):
        assert not connection.list(PATIENCE).pod_resources
    assert len(channels) == 1


def test_new_kubelet_is_asked_at_once(
    kubelet: Kubelet, connection: PodResourcesClient, channels: list[grpc.Channel]
) -> None:
    for _ in range(3):
        kubelet.start()
        assert not connection.list(PATIENCE).pod_resources
        kubelet.stop()
    assert len(channels) == 3


def test_absent_kubelet_is_reported_and_its_return_is_noticed_at_once(
    kubelet: Kubelet, connection: PodResourcesClient, channels: list[grpc.Channel]
) -> None:
    for _ in range(3):
        with pytest.raises(KubeletUnreadable, match="does not exist: check that the kubelet runs"):
            connection.list(0.5)
    kubelet.start()
    assert not connection.list(PATIENCE).pod_resources
    assert len(channels) == 4  # none waits for gRPC's backoff after a failure


def test_connects_again_after_it_was_closed(
    kubelet: Kubelet, connection: PodResourcesClient
) -> None:
    kubelet.start()
    connection.list(PATIENCE)
    connection.close()
    assert not connection.list(PATIENCE).pod_resources


def test_many_threads_ask_while_kubelets_come_and_go(
    kubelet: Kubelet, connection: PodResourcesClient
) -> None:
    kubelet.start()
    answered = threading.Semaphore(0)
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            try:
                connection.list(2.0)
                answered.release()
            except KubeletUnreadable:
                pass

    with ThreadPoolExecutor(6) as threads:
        asking = [threads.submit(ask) for _ in range(6)]
        try:
            for _ in range(20):
                assert answered.acquire(timeout=PATIENCE)
                kubelet.stop()
                kubelet.start()
        finally:
            ended.set()
        for thread in asking:
            thread.result(PATIENCE)
    assert not connection.list(PATIENCE).pod_resources


def test_wait_for_a_pending_call_ends_with_the_callers_deadline(
    root: Path, connection: PodResourcesClient
) -> None:
    socket_path = Paths(kubelet=root).pod_resources
    socket_path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as silent, ThreadPoolExecutor(1) as threads:
        silent.bind(str(socket_path))
        silent.listen()
        first = threads.submit(connection.list, PATIENCE)
        until(lambda: select.select([silent], [], [], 0)[0])
        with pytest.raises(KubeletUnreadable, match="has not answered an earlier call"):
            connection.list(0.2)
        silent.accept()[0].close()
        silent.close()
        with pytest.raises(KubeletUnreadable, match=r"DEADLINE_EXCEEDED|UNAVAILABLE"):
            first.result()
