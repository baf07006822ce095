"""Gives the store of nv-ipam's node daemon what podfabric's pods hold, on the way back to it.

With that the daemon gives no address again that podfabric gave, and its DELs and its cleaner free
them. The order: our copy of what is written closes the node to new pods, in the transaction that
reads the reservations; then the daemon's file is replaced; then it counts as imported, since both
stores say the same. A kill between two of them leaves the node closed, and the command goes on from
there. `podfabric ipam import` opens it again.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from base.files import write_atomically
from cni.spec.errors import CNIError, Code
from ipam.nv_ipam import importing
from ipam.nv_ipam.importing import EXPORTED, DaemonStore, StoredEntry, StoredPool
from ipam.nv_ipam.pools import domain_of
from ipam.sqlite_store import SqliteStore
from ipam.store import Reservation
from ipam.store_files import StoreFiles
from ipam.tables import Tables

_OURS = domain_of("")
_IPPOOL = "ippool/"
_MODE = 0o664  # as the daemon makes it
_ESCAPED = re.compile("[<>&\u2028\u2029]")  # by Go's encoding/json, whose text has the checksum


def export(store: SqliteStore, source: Path) -> list[Reservation]:
    """Write what pods hold of nv-ipam's pools into the daemon's store; what was written.

    CNIError 11 if the daemon runs, or its store has what was not imported; 5, 6, 112; OSError.
    """
    importing.require_stopped(source.with_name(importing.SOCKET))
    content = _read(source)
    former = importing.decoded(source, content) if content else None
    given: list[Reservation] = []
    written = b""
    store_id = ""

    def closed(tables: Tables) -> None:
        nonlocal written, store_id
        store_id = tables.meta.store
        _require_known(store.directory, store_id, source, content, former)
        given.extend(
            each
            for each in tables.all()
            if each.domain.startswith(_OURS) and each.boot == store.boot
        )
        written = encoded(given, former)
        write_atomically(store.directory / EXPORTED, written)

    store.look(closed)
    source.parent.mkdir(exist_ok=True)
    write_atomically(source, written, _MODE)
    importing.require_stopped(
        source.with_name(importing.SOCKET)
    )  # a daemon has read what was there
    importing.mark(store.directory, store_id, written)
    return given


def forget_freed(store: SqliteStore, source: Path, content: bytes) -> int:
    """Forget what the daemon was given and has freed since, before its store is imported; how many
    reservations. CNIError 6."""
    try:
        exported = (store.directory / EXPORTED).read_bytes()
    except FileNotFoundError:
        return 0
    ids: list[str] = []
    store.look(lambda tables: ids.append(tables.meta.store))
    if not importing.is_marked(store.directory, ids[0], exported):
        return 0  # the daemon has not been given it
    kept = set(map(_whose, importing.reservations_of(source, content, store.boot)))
    given = importing.reservations_of(store.directory / EXPORTED, exported, store.boot)
    freed = set(map(_whose, given)) - kept
    gone = [each for each in store.reservations() if _whose(each) in freed]
    for each in gone:
        store.forget(each)
    return len(gone)


def is_complete(files: StoreFiles) -> bool:
    """Whether the daemon's store has all that pods hold. CNIError 5, 11, 112; OSError."""
    try:
        exported = (files.directory / EXPORTED).read_bytes()
    except FileNotFoundError:
        return False
    with files.transaction() as tables:
        store = tables.meta.store
    return importing.is_marked(files.directory, store, exported)


def reopen(directory: Path) -> None:
    """Serve the node again, once the daemon's store was imported. OSError."""
    (directory / EXPORTED).unlink(missing_ok=True)


def _whose(held: Reservation) -> tuple[str, str, str, str]:
    return held.domain, held.address, held.container_id, held.ifname


def encoded(given: Sequence[Reservation], former: DaemonStore | None) -> bytes:
    """The daemon's file with these reservations: its pools go on where it has been in each."""
    last = former.pools or {} if former is not None else {}
    by_pool = defaultdict[str, dict[str, StoredEntry]](dict)
    for each in given:
        key = each.domain.removeprefix(_OURS).removeprefix(_IPPOOL)
        by_pool[key][f"{each.container_id}_{each.ifname}"] = _entry(each)
    pools = {
        key: StoredPool(
            name=key,
            entries=dict(sorted(by_pool.get(key, {}).items())),
            last_pool_config=last[key].last_pool_config if key in last else "",
            last_reserved_ip=last[key].last_reserved_ip if key in last else "",
        )
        for key in sorted({*by_pool, *last})
    }
    text = msgspec.json.encode(DaemonStore(version=1, checksum=0, pools=pools)).decode()
    text = _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    content = text.encode()
    checksum = importing.checksum_of(content)
    return content.replace(b'"checksum":0', b'"checksum":%d' % checksum, 1)


def _entry(held: Reservation) -> StoredEntry:
    since = datetime.fromtimestamp(held.since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return StoredEntry(
        container_id=held.container_id,
        interface_name=held.ifname,
        ip_address=held.address,
        metadata=importing.EntryMetadata(
            create_time=since,
            pod_uuid=held.uid,
            pod_name=held.pod,
            pod_namespace=held.namespace,
            pool_config_snapshot=msgspec.json.encode({"subnet": held.range}).decode(),
        ),
    )


def _read(source: Path) -> bytes:
    try:
        return source.read_bytes()
    except FileNotFoundError:
        return b""


def _require_known(
    directory: Path, store: str, source: Path, content: bytes, former: DaemonStore | None
) -> None:
    """Raises CNIError 11 if the daemon's store may have what ours lacks: it would be lost."""
    if former is None or not any(pool.entries for pool in (former.pools or {}).values()):
        return
    if importing.is_marked(directory, store, content):
        return
    try:
        if (directory / EXPORTED).read_bytes() == content:  # it was killed before the mark
            return
    except FileNotFoundError:
        pass
    raise CNIError(
        Code.TRY_AGAIN,
        f"{source} has reservations that this node's store may lack: nothing was written: run "
        f"`podfabric ipam import {source}` first, or remove that file if no pod of then runs here",
    )
