"""Sweeps of several plugins: a failure of one plugin does not stop the next sweeps."""

from pathlib import Path
from typing import Any, ClassVar

import pytest

from base.paths import Paths
from cni.attachments.journal import JournalEntry, Phase
from cni.attachments.lifecycle import InterfacePlugin
from cni.attachments.orphans import sweep_all
from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError, Code
from cni.spec.request import Request
from host.errors import HostError
from ipam.plugin import AddressPlugin
from ipam.store.reservations import Reservation
from ipam.store.sqlite_store import SqliteStore
from ipam.store_choice import Stores


class Made(InterfacePlugin):
    """A plugin without a kernel; `stuck` are the containers whose interface cannot be detached."""

    name: ClassVar = "made"
    strays: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()

    def add(self, request: Request) -> dict[str, Any]:
        raise NotImplementedError

    def detach(self, attachment: Attachment, request: Request, entry: JournalEntry | None) -> None:
        if attachment.container_id in self.stuck:
            raise HostError("removed too early: it is busy")

    def adopt(self, attachment: Attachment, request: Request) -> None:
        return None

    def compare(self, attachment: Attachment, request: Request) -> None:
        raise NotImplementedError

    def require_ready(self, request: Request) -> None:
        raise NotImplementedError

    def remove_strays(self) -> list[str]:
        return list(self.strays)


class Failing(Made):
    """A plugin whose sweep fails as a whole."""

    name: ClassVar = "failing"

    def remove_strays(self) -> list[str]:
        raise HostError("listing interfaces: no buffer space")


class Other(Made):
    """Another plugin of the same node."""

    name = "other"


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(run=tmp_path / "run", state=tmp_path / "state")


def addresses(paths: Paths) -> AddressPlugin:
    """The node's addresses."""
    return AddressPlugin(Stores(paths.ipam), paths.boot_id)


def killed(plugin: InterfacePlugin, container_id: str) -> Attachment:
    """Leave the attachment of a killed ADD."""
    entry = JournalEntry(
        plugin=plugin.name,
        network="fabric",
        container_id=container_id,
        ifname="net1",
        netns="/nowhere",
        netns_identity="cookie:0",
        boot_id=plugin.paths.boot_id(),
        phase=Phase.ADDING,
    )
    plugin.journal.write(entry)
    return entry.attachment


def test_what_one_removed_is_reported_with_the_failure_of_another(paths: Paths) -> None:
    made = Made(paths)
    killed(made, "c1")
    outcomes = sweep_all(addresses(paths), Failing(paths), made)
    assert [outcome.removed for outcome in outcomes] == [True, False]
    assert list(map(str, outcomes)) == [
        "removed fabric/c1/net1: its sandbox is gone",
        "sweep: listing interfaces: no buffer space",
    ]
    assert list(made.journal.entries()) == []


def test_failure_alone_is_an_error(paths: Paths) -> None:
    with pytest.raises(CNIError, match="no buffer space"):
        sweep_all(addresses(paths), Failing(paths), Made(paths))


def test_damaged_file_that_every_sweep_meets_is_reported_once(paths: Paths) -> None:
    first, second = Made(paths), Made(paths)
    second.strays = ("ib0.8001",)
    damaged = first.journal.path_of(killed(first, "c1"))
    damaged.write_bytes(b"{")
    first_result, other = sweep_all(addresses(paths), first, second)
    assert str(damaged) in str(first_result) and not first_result.removed
    assert str(other) == 'removed stray interface "ib0.8001"' and other.removed


def test_what_was_begun_of_an_entry_by_a_killed_call_goes(paths: Paths) -> None:
    made = Made(paths)
    entry = made.journal.path_of(killed(made, "c1"))
    begun = entry.rename(entry.with_name(f".{entry.name}.tmp"))  # as base.files names it
    assert sweep_all(addresses(paths), made) == ()
    assert not begun.exists()


def test_removals_are_told_from_failures(paths: Paths) -> None:
    made = Made(paths)
    made.stuck = ("c1",)
    stuck, gone = killed(made, "c1"), killed(made, "c2")
    outcomes = {str(outcome): outcome.removed for outcome in sweep_all(addresses(paths), made)}
    assert outcomes.pop(f"removed {gone}: its sandbox is gone")
    ((text, removed),) = outcomes.items()
    assert text.startswith(str(stuck)) and not removed
    assert [entry.attachment for entry in made.journal.entries()] == [stuck]  # type: ignore[union-attr]


def test_del_by_another_plugin_removes_nothing_and_says_so(paths: Paths) -> None:
    made, other = Made(paths), Other(paths)
    attachment = killed(made, "c1")
    entry = made.journal.read(attachment)
    assert isinstance(entry, JournalEntry)
    with pytest.raises(CNIError, match='plugin "made" made attachment') as caught:
        other.delete(entry.delete_request())
    assert caught.value.code == Code.CLEANUP_INCOMPLETE
    assert made.journal.read(attachment) == entry
    made.delete(entry.delete_request())
    assert made.journal.read(attachment) is None


def test_addresses_of_an_earlier_boot_are_released_and_those_of_this_one_stay(paths: Paths) -> None:
    """A power cut brings back a reservation whose DEL had released it and removed its entry."""
    paths.ipam.mkdir(parents=True)
    store = SqliteStore(paths.ipam, paths.boot_id())

    def held(address: str, boot: str, segment: str = "ib0 0xffff") -> Reservation:
        return Reservation(
            domain="",
            address=address,
            range="10.0.0.0/24",
            network="fabric",
            container_id=f"c{address}",
            ifname="net1",
            boot=boot,
            segment=segment,
        )

    imported = held("10.0.0.3", "earlier", "")
    store.load([held("10.0.0.1", "earlier"), held("10.0.0.2", store.boot), imported])
    outcomes = sweep_all(addresses(paths), Made(paths))
    assert all(outcome.removed for outcome in outcomes)
    assert list(map(str, outcomes)) == [
        f"released {address} of fabric/c{address}/net1: reserved in an earlier boot"
        for address in ("10.0.0.1", "10.0.0.3")
    ]
    assert [each.address for each in store.reservations()] == ["10.0.0.2"]
    assert sweep_all(addresses(paths), Made(paths)) == ()


def test_sweep_makes_no_store_where_there_is_none(paths: Paths) -> None:
    assert sweep_all(addresses(paths), Made(paths)) == ()
    assert not paths.ipam.exists()


def test_store_that_cannot_be_read_does_not_hide_what_was_removed(paths: Paths) -> None:
    made = Made(paths)
    gone = killed(made, "c1")
    paths.ipam.mkdir(parents=True)
    (paths.ipam / "reservations.db").write_bytes(b"no database")
    removed, failure = sweep_all(addresses(paths), made)
    assert str(removed) == f"removed {gone}: its sandbox is gone"
    assert "fsck" in str(failure) and not failure.removed
