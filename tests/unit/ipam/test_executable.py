"""The executable `podfabric-ipam`: its calls wait for each other, and need their client."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from base import locks
from base.interrupts import Call, Terminated, serving
from cni.spec.attachment import Attachment
from cni.spec.errors import Code
from ipam.plugin import IpamExecutable
from tests.unit.ipam.calls import Calls, error_of, request
from tests.waiting import PATIENCE

POOL = {"range": "10.0.0.0/24"}


@pytest.fixture
def executable(node: Calls, memory_path: Path) -> IpamExecutable:
    return IpamExecutable(node.plugin, memory_path / "lock")


def ended(call: Call, work: Callable[[], object]) -> bool:
    """Whether the work was not done, because its client had gone."""
    with serving(call):
        try:
            work()
        except Terminated:
            return True
    return False


def test_add_is_undone_if_its_client_goes_while_it_reserves(
    node: Calls, executable: IpamExecutable
) -> None:
    reserved = []

    def gone() -> bool:
        reserved.append(node.held())
        return bool(node.held())

    add = Call(endable=True, gone=gone)
    assert ended(add, lambda: executable.add(request("ADD", POOL, "c1")))
    assert reserved == [{}, {"10.0.0.1": "c1"}]
    assert node.held() == {}


@pytest.mark.parametrize("command", ["ADD", "DEL", "GC"])
def test_call_of_a_client_that_has_gone_changes_nothing(
    node: Calls, executable: IpamExecutable, command: str
) -> None:
    """The address may belong to a later attachment by now."""
    node.add(POOL)
    before = node.held()
    work: dict[str, Callable[[], object]] = {
        "ADD": lambda: executable.add(request("ADD", POOL, "c2")),
        "DEL": lambda: executable.delete(request("DEL", POOL, "c1")),
        "GC": lambda: executable.gc(
            request("GC", POOL, "", config={"cni.dev/valid-attachments": []})
        ),
    }
    assert ended(Call(command == "ADD", lambda: True), work[command])
    assert node.held() == before
    assert not ended(Call(command == "ADD", lambda: False), work[command])
    assert node.held() != before


def test_calls_of_one_attachment_wait_for_each_other_and_others_do_not(
    node: Calls, executable: IpamExecutable, memory_path: Path
) -> None:
    path = memory_path / "lock" / f"addresses-{Attachment('n1', 'c1', 'eth0').key}"
    executable.add(request("ADD", POOL, "c1"))
    delete = threading.Thread(target=lambda: executable.delete(request("DEL", POOL, "c1")))
    with ExitStack() as held:
        held.enter_context(locks.locked(path, "a test"))
        delete.start()
        executable.add(request("ADD", POOL, "c2"))
        executable.delete(request("DEL", POOL, "c2"))
        delete.join(0.2)
        assert node.held() == {"10.0.0.1": "c1"}
    delete.join(PATIENCE)
    assert node.held() == {}
    assert list(path.parent.iterdir()) == []


def test_lock_that_cannot_be_made_is_an_error(node: Calls, memory_path: Path) -> None:
    (memory_path / "lock").write_text("")
    executable = IpamExecutable(node.plugin, memory_path / "lock")
    error = error_of(lambda: executable.delete(request("DEL", POOL, "c1")))
    assert error.code == Code.IO_FAILURE
    assert str(memory_path / "lock") in error.message


def test_other_main_plugins_cannot_have_each_address_probed(
    node: Calls, executable: IpamExecutable
) -> None:
    asked = request("ADD", {**POOL, "probe": "always"}, "c1")
    error = error_of(lambda: executable.add(asked))
    assert error.code == Code.INVALID_CONFIG
    assert '"ipam.probe": only podfabric\'s interface plugins probe' in error.message
    assert node.held() == {}
