"""One change of the store's tables, counted, and what a failure of it means."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ipam.recovery import FAILURES, UNCERTAIN, explained
from ipam.tables import Tables


@contextmanager
def change(tables: Tables, directory: Path) -> Iterator[None]:
    """What the block writes to the open `tables` is one transaction of SQLite.

    CNIError if it failed and may have been made all the same; another failure made nothing.
    """
    seq = tables.meta.seq
    try:
        tables.begin()
        yield
        tables.record(seq + 1)
        tables.commit()
    except BaseException as error:
        if not _was_undone(tables, seq) and isinstance(error, FAILURES):
            raise explained(error, directory, UNCERTAIN) from None
        raise


def _was_undone(tables: Tables, seq: int) -> bool:
    """After a failure: whether the database has nothing of the transaction.

    False also if that cannot be found out.
    """
    try:
        tables.reopen()
    except FAILURES:
        return False
    return tables.meta.seq == seq
