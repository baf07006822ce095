"""An agent that ends while the API server gives no answer: it waits for nothing that it need not
finish."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cni.spec.errors import CNIError, Code
from ipam.cluster.lessee import Lessee
from ipam.cluster.step_thread import JOIN
from ipam.plugin import AddressPlugin
from ipam.scope import Stores
from ipam.store_files import StoreFiles
from tests.fake_api import FakeApi
from tests.silence import Silence
from tests.unit.ipam.calls import request
from tests.unit.ipam.cluster.nodes import RANGE, blocks_of, put_pool
from tests.waiting import PATIENCE, join, until


@pytest.fixture
def silence() -> Iterator[Silence]:
    silence = Silence("leases")
    yield silence
    silence.end()


@pytest.fixture
def files(memory_path: Path) -> Iterator[StoreFiles]:
    with closing(StoreFiles(memory_path / "ipam")) as files:
        yield files


@pytest.fixture
def server() -> FakeApi:
    server = FakeApi()
    put_pool(server)
    server.add_node("node-a")
    return server


def confirmed(server: FakeApi, files: StoreFiles, silence: Silence) -> Lessee:
    lessee = Lessee(server.client("node-a", silence), files, "node-a", "boot-1")
    lessee.start()
    until(lambda: lessee.counted().confirmed is not None)
    return lessee


def adding(lessee: Lessee, files: StoreFiles) -> tuple[threading.Thread, list[CNIError]]:
    """An ADD that needs a block, in a thread, and its error."""
    stores = Stores(files, lambda: "cluster", lessee, patience=PATIENCE)
    plugin = AddressPlugin(stores, lambda: "boot-1")
    errors: list[CNIError] = []

    def add() -> None:
        try:
            plugin.reserve(request("ADD", {"range": RANGE}, "c1", pod="p1"))
        except CNIError as error:
            errors.append(error)

    thread = threading.Thread(target=add, name="add")
    thread.start()
    return thread, errors


def test_no_answer_to_a_read_is_waited_for(
    server: FakeApi, files: StoreFiles, silence: Silence
) -> None:
    lessee = confirmed(server, files, silence)
    silence.verbs = ("get", "list")
    thread, errors = adding(lessee, files)
    assert silence.asked.wait(PATIENCE)
    began = time.monotonic()
    lessee.close()
    assert time.monotonic() - began < JOIN / 2  # it is milliseconds on an idle machine
    join(thread)  # its claim has ended, too
    assert [error.code for error in errors] == [Code.TRY_AGAIN]


def test_an_answer_that_comes_after_the_end_changes_nothing(
    server: FakeApi, files: StoreFiles, silence: Silence
) -> None:
    lessee = confirmed(server, files, silence)
    silence.verbs = ("get",)
    thread, _ = adding(lessee, files)
    assert silence.asked.wait(PATIENCE)
    lessee.close()
    join(thread)
    worker = lessee._thread
    assert worker is not None and worker.is_alive()
    silence.end()
    join(worker)
    assert not blocks_of(server)
    with files.transaction() as tables:
        assert not list(tables.blocks())


def test_a_change_that_is_under_way_is_waited_for(
    server: FakeApi, files: StoreFiles, silence: Silence
) -> None:
    lessee = confirmed(server, files, silence)
    silence.verbs = ("create",)
    thread, _ = adding(lessee, files)
    assert silence.asked.wait(PATIENCE)
    closer = threading.Thread(target=lessee.close, name="closer")
    closer.start()
    until(lambda: lessee._closed)
    closer.join(0.5)
    assert closer.is_alive()
    silence.end()
    join(closer)
    join(thread)
    assert len(blocks_of(server)) == 1  # the next agent finds it
