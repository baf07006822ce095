"""An agent that ends while the API server gives no answer: what follows nv-ipam's pools waits for
nothing that it need not finish."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ipam.cluster.nv_ipam.service import NvPoolService, OwnPoolService
from ipam.cluster.objects import AddressBlock
from ipam.cluster.step_thread import _JOIN, StepThread
from ipam.cluster.until_closed import UntilClosed
from ipam.store_files import StoreFiles
from tests.fake_api import FakeApi
from tests.silence import Silence
from tests.unit.ipam.cluster.contract import block
from tests.waiting import PATIENCE, join, until


@pytest.fixture
def files(memory_path: Path) -> Iterator[StoreFiles]:
    with closing(StoreFiles(memory_path / "ipam")) as files:
        yield files


@pytest.mark.parametrize("form", [NvPoolService, OwnPoolService])
def test_no_answer_to_a_read_is_waited_for(
    files: StoreFiles, form: type[NvPoolService] | type[OwnPoolService]
) -> None:
    server, silence = FakeApi(), Silence("nv-ipam", "get", "list")
    server.add_node("node-a")
    service = form(server.client("node-a", silence), files, "node-a", "boot-1", "nv")
    service.start()
    assert silence.asked.wait(PATIENCE)
    began = time.monotonic()
    service.close()
    assert time.monotonic() - began < _JOIN / 2  # it is milliseconds on an idle machine
    silence.end()


class Steps(StepThread):
    """Makes a block in each step."""

    def __init__(self, calls: UntilClosed) -> None:
        super().__init__("nv-ipam")
        self._api = calls

    def step(self) -> float:
        self._api.create(block())
        return 0.0


def test_a_change_that_is_under_way_is_waited_for() -> None:
    server, silence = FakeApi(), Silence("nv-ipam", "create")
    calls = UntilClosed(server.client("node-a", silence))
    steps = Steps(calls)
    steps.start(calls)
    assert silence.asked.wait(PATIENCE)
    calls.close()
    closer = threading.Thread(target=steps.close, name="closer")
    closer.start()
    until(lambda: steps._closed)
    closer.join(0.5)
    assert closer.is_alive()
    silence.end()
    join(closer)
    assert len(server.look_at_all(AddressBlock).items) == 1
