"""A store that is rebuilt on a full disk stays sound and complete."""

import sqlite3
from contextlib import closing, suppress

from cni.spec.errors import CNIError
from ipam.store import repair
from ipam.store.database import DATABASE
from ipam.store.repair import NodeFacts, build, new_store
from ipam.store.store_files import StoreFiles
from ipam.store.tables import Tables
from tests.attacks.full_disk import small_disk
from tests.attacks.full_disk_ipam import silent
from tests.unit.ipam.calls import BOOT, Calls, owner, reservation

# Their pages are more than those of an empty store.
RESERVATIONS = [reservation(f"10.0.0.{number}", f"c{number}") for number in range(1, 120)]
FACTS = NodeFacts(BOOT, tuple(RESERVATIONS))
ENOUGH = 50  # pages


def test_store_is_whole_after_a_rebuild_however_many_pages_were_left() -> None:
    rebuilt = []
    with small_disk() as disk:
        base = Calls(StoreFiles(disk.base, report=silent, kept=False))
        base.store.load(RESERVATIONS)
        held = base.held()
        for pages in range(0, ENOUGH + 1, 2):
            disk.restore()
            disk.leave_pages(pages)
            try:
                repair.rebuild(disk.directory, silent)
                rebuilt.append(True)
            except CNIError:
                rebuilt.append(False)
            disk.make_room()
            files = StoreFiles(disk.directory, report=silent, kept=False, facts=lambda: FACTS)
            calls = Calls(files)
            calls.store.release(owner("nobody").attachment)
            assert calls.held() == held, pages
            assert repair.check(disk.directory, print), pages
    assert rebuilt[-1] and not rebuilt[0]


def test_database_is_built_whole_or_not_at_all_however_many_pages_are_left() -> None:
    built = []
    with small_disk() as disk:
        for pages in range(ENOUGH):
            disk.empty()
            disk.leave_pages(pages)
            with suppress(sqlite3.Error, OSError):
                build(disk.directory / DATABASE, new_store())
            disk.make_room()
            built.append(disk.files() == {DATABASE})
            if built[-1]:
                with closing(Tables(disk.directory / DATABASE)) as tables:
                    tables.verify()
            else:
                assert not disk.files()
    assert built[-1] and not built[0]
