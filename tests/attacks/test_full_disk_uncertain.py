"""A failed call that could not undo its change reports that, and its remedy works.

The change is committed, although SQLite reports an error.
"""

import errno
from collections.abc import Iterator
from unittest import mock

import pytest

from cni.spec.errors import CNIError, Code
from ipam.store.tables import Tables
from tests.attacks.full_disk_ipam import RANGES, WAYS, Watched, disk_with_store, node_on
from tests.unit.ipam.calls import error_of


@pytest.fixture(params=WAYS)
def node(request: pytest.FixtureRequest) -> Iterator[Watched]:
    with disk_with_store() as disk:
        disk.restore()
        with node_on(disk.directory, request.param) as node:
            yield node


def failure_of(verb: str, container_id: str, node: Watched) -> CNIError:
    """The error of a call whose change remains."""
    commit = Tables._commit

    def refuse(tables: Tables) -> None:
        commit(tables)
        raise OSError(errno.EIO, "Input/output error")

    call = node.calls.add if verb == "ADD" else node.calls.delete
    with mock.patch.object(Tables, "_commit", refuse):
        error = error_of(lambda: call(RANGES, container_id))
    assert error.code == Code.IO_FAILURE
    return error


def test_uncertain_add_reports_that_and_del_releases(node: Watched) -> None:
    error = failure_of("ADD", "new", node)
    assert "it is not certain whether the change was made: call DEL" in error.message
    assert "nothing was changed" not in error.message
    assert node.call("DEL", "new")
    node.require_that_all_goes_on()


def test_uncertain_del_reports_that_and_another_del_releases(node: Watched) -> None:
    error = failure_of("DEL", "c1", node)
    assert "it is not certain whether the change was made" in error.message
    assert "nothing was changed" not in error.message
    assert node.call("DEL", "c1")
    node.require_that_all_goes_on()


def test_add_after_an_uncertain_del_gives_no_address_twice(node: Watched) -> None:
    failure_of("DEL", "c1", node)
    released = {address for address, holder in node.said.items() if holder == "c1"}
    kept = dict(node.calls.held())
    assert {address: holder for address, holder in node.said.items() if holder != "c1"} == {
        address: holder for address, holder in kept.items() if address not in released
    }
    node.said = kept
    node.require_that_all_goes_on()
