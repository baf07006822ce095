"""An agent that ends while the API server gives no answer."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cni.spec.errors import CNIError, Code
from ipam.leases.lessee import Lessee
from ipam.plugin import AddressPlugin
from ipam.store.store_files import StoreFiles
from ipam.store_choice import Stores
from tests.fake_api import FakeApi
from tests.silence import Silence
from tests.unit.ipam.calls import request
from tests.unit.ipam.leases.nodes import RANGE, blocks_of, put_pool
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


def test_an_answer_that_does_not_come_is_not_waited_for_and_changes_nothing(
    server: FakeApi, files: StoreFiles, silence: Silence
) -> None:
    lessee = confirmed(server, files, silence)
    silence.verbs = ("list",)
    thread, errors = adding(lessee, files)
    assert silence.asked.wait(PATIENCE)
    began = time.monotonic()
    lessee.close()
    assert time.monotonic() - began < PATIENCE / 2
    join(thread)  # its claim has ended, too
    assert [error.code for error in errors] == [Code.TRY_AGAIN]
    worker = lessee._thread
    assert worker is not None and worker.is_alive()
    silence.end()
    join(worker)
    assert not blocks_of(server)
    with files.transaction() as tables:
        assert not list(tables.blocks())
