"""Reservations out of the store of nv-ipam's node daemon (/var/lib/cni/nv-ipam/store).

The file has the pool of each reservation, its container, interface and pod, and not the network's
name. So an imported reservation has IMPORTED for its network, until its pod's next ADD or DEL. That
finds it by container and interface, or by pod and interface: both are unique on a node.
"""

import hashlib
import os
import re
import socket
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import msgspec
from msgspec.structs import replace

from base import decoding
from base.files import write_atomically
from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError, Code
from ipam.addresses import parse, parse_interface, text
from ipam.nv_ipam.pools import domain_of
from ipam.store import Owner, Reservation
from ipam.tables import Tables

IMPORTED = " nv-ipam"
"""No network has this name, since it begins with a space."""

STORE = Path("/var/lib/cni/nv-ipam/store")

SOCKET = "daemon.sock"
"""Beside the store. The shim asks the daemon there."""

MARK = "nv-ipam-imported"
"""Beside our store: which content of the daemon's store was imported into it."""

EXPORTED = "nv-ipam-exported"
"""Beside our store, while nv-ipam's daemon serves this node again: what its store was given."""

_VERSION = 1
_CHECKSUM = re.compile(rb'"checksum":(\d+)')
_FNV_PRIME, _FNV_BASIS = 16777619, 2166136261


class EntryMetadata(msgspec.Struct, frozen=True):
    """Of a reservation; `pool_config_snapshot` is a JSON document in a text.

    The fields of this and of what follows are in the order of nv-ipam (pkg/ipam-node/types): its
    checksum depends on it.
    """

    create_time: str = ""
    pod_uuid: str = ""
    pod_name: str = ""
    pod_namespace: str = ""
    device_id: str = ""
    pool_config_snapshot: str = ""


class StoredEntry(msgspec.Struct, frozen=True):
    """A reservation of the daemon."""

    container_id: str
    interface_name: str
    ip_address: str
    metadata: EntryMetadata = EntryMetadata()


class StoredPool(msgspec.Struct, frozen=True):
    """The reservations of a pool, by `<container>_<interface>`."""

    name: str = ""
    entries: dict[str, StoredEntry] | None = None
    last_pool_config: str = ""
    last_reserved_ip: str | None = ""


class DaemonStore(msgspec.Struct, frozen=True):
    """The whole file. The key of an IPPool is its name, that of a CIDRPool `cidrpool/NAME`."""

    version: int
    checksum: int
    pools: dict[str, StoredPool] | None


class _Snapshot(msgspec.Struct, frozen=True):
    subnet: str


def is_store(content: bytes) -> bool:
    """Whether it looks like the daemon's store."""
    return content[:1] == b"{" and b'"checksum"' in content and b'"pools"' in content


def reservations(source: Path, boot: str) -> list[Reservation]:
    """Everything in the store. CNIError 6 if it is damaged, 11 if the daemon still runs."""
    require_stopped(source.with_name(SOCKET))
    return reservations_of(source, source.read_bytes(), boot)


def reservations_of(source: Path, content: bytes, boot: str) -> list[Reservation]:
    """The same of a content of that file. CNIError 6 if it is damaged."""
    store = decoded(source, content)
    try:
        return [
            _reservation(key, entry, boot)
            for key, pool in sorted((store.pools or {}).items())
            for entry in (pool.entries or {}).values()
        ]
    except (msgspec.MsgspecError, ValueError) as error:
        raise _damaged(source, error) from None


def decoded(source: Path, content: bytes) -> DaemonStore:
    """The content of the daemon's store. CNIError 6 if it is damaged."""
    try:
        store = decoding.decode(content, DaemonStore)
        if store.version != _VERSION:
            raise ValueError(f"it has version {store.version}, and {_VERSION} is known")
        if checksum_of(content) != store.checksum:
            raise ValueError("its checksum is wrong")
    except (msgspec.MsgspecError, ValueError) as error:
        raise _damaged(source, error) from None
    return store


def _damaged(source: Path, error: Exception) -> CNIError:
    return CNIError(Code.DECODING_FAILURE, f"{source}: {error}: nothing was done")


def imported(tables: Tables, owner: Owner) -> Sequence[Reservation]:
    """The imported part of the owner's attachment or pod, as the owner's network has it."""
    attachment = owner.attachment
    unnamed = Attachment(IMPORTED, attachment.container_id, attachment.ifname)
    held = tables.of_attachment(unnamed)
    held += tables.of_pod(Owner(unnamed, owner.pod))
    return [replace(each, network=attachment.network) for each in dict.fromkeys(held)]


def mark(directory: Path, store: str, content: bytes) -> None:
    """Remember that this content of the daemon's store is in the store of that id. OSError."""
    write_atomically(directory / MARK, _marked(store, content))


def is_marked(directory: Path, store: str, content: bytes) -> bool:
    """Whether `mark` remembers that. OSError."""
    try:
        return (directory / MARK).read_bytes() == _marked(store, content)
    except FileNotFoundError:
        return False


def require_open(directory: Path) -> None:
    """Raises CNIError 11 where nv-ipam's own daemon serves the node again (`exporting`)."""
    if why := why_closed(directory):
        raise CNIError(Code.TRY_AGAIN, f"{why}: nothing was reserved")


def why_closed(directory: Path) -> str | None:
    """Why podfabric gives no address of nv-ipam's pools here; None if it may."""
    if not os.path.exists(f"{directory}/{EXPORTED}"):  # noqa: PTH110 - each ADD does this
        return None
    return (
        "this node was given back to nv-ipam's daemon (`podfabric ipam export`): put NVIDIA's "
        "executable nv-ipam into the CNI directory and start the daemon; or stop it and run "
        f"`podfabric ipam import {STORE}`, and podfabric serves the node"
    )


def why_unfinished(source: Path, directory: Path, store: str) -> str | None:
    """Why the store of that id may lack what pods have from the daemon; None if it has it all."""
    if (why := why_closed(directory)) is not None:
        return why
    try:
        require_stopped(source.with_name(SOCKET))
        content = source.read_bytes()
    except FileNotFoundError:
        state = source.parent.parent
        return None if state.is_dir() else f"cannot see {state}, where nv-ipam's daemon works"
    except OSError as error:
        return f"cannot read {source}: {error.strerror}"
    except CNIError as error:
        return error.message
    try:
        if is_marked(directory, store, content):
            return None
    except OSError as error:
        return f"cannot read {directory / MARK}: {error.strerror}"
    try:
        found = decoding.decode(content, DaemonStore)
    except msgspec.MsgspecError as error:
        return f"{source} is damaged: {error}"
    if not any(pool.entries for pool in (found.pools or {}).values()):
        return None
    return (
        f"pods may have addresses from its daemon: run `podfabric ipam import {source}` here, or "
        "remove that file if no pod of then runs here any more"
    )


def _marked(store: str, content: bytes) -> bytes:
    return f"{store} {hashlib.sha256(content).hexdigest()}\n".encode()


def _reservation(key: str, entry: StoredEntry, boot: str) -> Reservation:
    meta = entry.metadata
    subnet = decoding.decode(meta.pool_config_snapshot, _Snapshot).subnet
    return Reservation(
        domain=domain_of(key if "/" in key else f"ippool/{key}"),
        address=text(parse(entry.ip_address)),
        range=str(parse_interface(subnet)[1]),
        network=IMPORTED,
        container_id=entry.container_id,
        ifname=entry.interface_name,
        namespace=meta.pod_namespace,
        pod=meta.pod_name,
        uid=meta.pod_uuid,
        boot=boot,
        since=_seconds(meta.create_time),
        segment="",
    )


def _seconds(written: str) -> int:
    """Of RFC 3339 with up to nine digits of a second, of which Python reads six."""
    try:
        return int(datetime.fromisoformat(re.sub(r"\.\d+", "", written)).timestamp())
    except ValueError:
        return 0


def checksum_of(content: bytes) -> int:
    """FNV-1a of the file with the checksum 0 in it."""
    found = _FNV_BASIS
    for byte in _CHECKSUM.sub(b'"checksum":0', content, count=1).rstrip():
        found = (found ^ byte) * _FNV_PRIME & 0xFFFFFFFF
    return found


def require_stopped(path: Path) -> None:
    """Raises CNIError 11 if the daemon answers at that socket, or that cannot be told."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5.0)
        try:
            client.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return
        except OSError as error:
            raise CNIError(
                Code.TRY_AGAIN, f"cannot tell whether nv-ipam's daemon runs: {path}: {error}"
            ) from None
    raise CNIError(
        Code.TRY_AGAIN,
        f"nv-ipam's daemon answers at {path}, and may give out addresses meanwhile: stop it on "
        "this node, and import then",
    )
