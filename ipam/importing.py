"""Reservations out of other IPAM plugins' stores: host-local's directory, whereabouts' IPPools.

host-local keeps neither range nor pod, and whereabouts no network. The caller supplies what is
missing. `import_all` then adds everything to a store, or nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cni.spec.attachment import Attachment
from cni.spec.config import convert
from cni.spec.errors import CNIError, Code, invalid_config
from ipam.addresses import Network, parse, parse_interface, text
from ipam.ranges import domain_of
from ipam.store import Reservation, Store

UNNAMED = " imported"
"""The network of what was imported from a store that knows none: no network has this name, since it
begins with a space. Container and interface tell which attachment it is."""


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """What the files do not say: `ranges` the addresses may be from, and where there is no
    interface name, `ifname`. `network_name` None is the pool's own; `shared` is the network's
    `enable_overlapping_ranges`."""

    network: str
    boot: str
    since: int
    ifname: str = "eth0"
    network_name: str | None = None
    shared: bool = True
    ranges: tuple[Network, ...] = ()


class _ImportedAddress(msgspec.Struct, frozen=True):
    id: str
    podref: str = ""  # whereabouts before 0.4.2 wrote none
    ifname: str = ""


class _WhereaboutsPoolSpec(msgspec.Struct, frozen=True):
    range: str
    allocations: dict[str, _ImportedAddress] | None = None


class _Metadata(msgspec.Struct, frozen=True):
    name: str = ""


class _WhereaboutsPool(msgspec.Struct, frozen=True):
    spec: _WhereaboutsPoolSpec
    metadata: _Metadata = _Metadata()


def host_local(directory: Path, defaults: Defaults, notes: list[str]) -> list[Reservation]:
    """The reservations below `<dataDir>/<network>`: files named by address (backend/disk).

    Each holds `<container id>\\r\\n<ifname>`, before version 0.8 the container id alone. CNIError 6
    if host-local made no file there.
    """
    reservations: list[Reservation] = []
    is_theirs = False
    for path in sorted(directory.iterdir()):
        try:
            address = parse(path.name)
        except ValueError:
            if path.name == "lock" or path.name.startswith("last_reserved_ip."):
                is_theirs = True
            else:
                notes.append(f"{path}: not named by an address, left out")
            continue
        is_theirs = True
        container_id, _, ifname = path.read_text(errors="replace").strip().partition("\n")
        if not container_id.strip():
            notes.append(f"{path}: empty, the rest of an ADD that died: left out")
            continue
        network = _network_of(address, defaults.ranges)
        reservations.append(
            Reservation(
                domain=domain_of(defaults.network_name or "", network, shared=defaults.shared),
                address=text(address),
                range=str(network),
                network=defaults.network,
                container_id=container_id.strip(),
                ifname=ifname.strip() or defaults.ifname,
                boot=defaults.boot,
                since=int(path.stat().st_mtime),
                segment="",
            )
        )
    if not is_theirs:
        raise _unusable(directory, "has no file that is named by an address")
    return reservations


def whereabouts(manifest: Path, defaults: Defaults, notes: list[str]) -> list[Reservation]:
    """The allocations of the IPPools in a YAML file: documents, or lists of kubectl.

    An allocation's key is its offset from the literal address in `spec.range` (CRD v1alpha1).
    CNIError 6 if there is no IPPool.
    """
    reservations: list[Reservation] = []
    is_theirs = False
    for document in _documents(manifest):
        kind = document.get("kind", "")
        if kind != "IPPool":
            notes.append(f"{manifest}: {kind or 'a document without a kind'}: left out")
            continue
        name = str((document.get("metadata") or {}).get("name", ""))
        pool = convert(document, _WhereaboutsPool, f"IPPool {name}")
        reservations += _allocations(pool, defaults)
        is_theirs = True
    if not is_theirs:
        raise _unusable(manifest, "has no IPPool")
    return reservations


def import_all(store: Store, reservations: Sequence[Reservation]) -> int:
    """Add what is not there yet, all or nothing. Answers how many; CNIError 111 for conflicts."""
    held = {
        (reservation.domain, reservation.address): reservation
        for reservation in store.reservations()
    }
    new: dict[tuple[str, str], Reservation] = {}
    conflicts = []
    for reservation in reservations:
        key = (reservation.domain, reservation.address)
        holder = held.get(key) or new.get(key)
        if holder is None:
            new[key] = reservation
        elif not _is_same(holder, reservation):
            conflicts.append(
                f"{reservation.address}: held by {holder.holder}, not by {reservation.holder}"
            )
    if conflicts:
        raise CNIError(
            Code.ADDRESS_TAKEN, f"nothing was imported: {'; '.join(conflicts)}", str(len(conflicts))
        )
    if new:
        store.load(list(new.values()))
    return len(new)


def unnamed(attachment: Attachment) -> Attachment:
    """The attachment as an import has it that knew no network."""
    return Attachment(UNNAMED, attachment.container_id, attachment.ifname)


def _unusable(source: Path, why: str) -> CNIError:
    return CNIError(
        Code.DECODING_FAILURE,
        f"{source}: {why}, so nothing was imported: name host-local's directory of a network, "
        "or a YAML file with whereabouts' IPPools",
    )


def _is_same(held: Reservation, new: Reservation) -> bool:
    """Whether the holder is the one to import: also if an import had no network, and has one now.

    The pod may have a new sandbox since then.
    """
    if held.attachment == new.attachment:
        return True
    is_unnamed = new.network.startswith(" ") and held.ifname == new.ifname
    is_pod = new.uid != "" and held.uid == new.uid
    return is_unnamed and (is_pod or held.container_id == new.container_id)


def _allocations(pool: _WhereaboutsPool, defaults: Defaults) -> Iterator[Reservation]:
    try:
        base, network = parse_interface(pool.spec.range)
    except ValueError as error:
        raise invalid_config(f'IPPool {pool.metadata.name}: "spec.range": {error}') from None
    network_name = defaults.network_name
    if network_name is None:
        network_name = _network_name(pool)
    domain = domain_of(network_name, network, shared=defaults.shared)
    for offset, allocation in sorted((pool.spec.allocations or {}).items()):
        address = base + int(offset) if offset.isascii() and offset.isdigit() else -1
        if address not in network:
            raise invalid_config(
                f'IPPool {pool.metadata.name}: "spec.allocations.{offset}" is not an address of '
                f"{network}"
            )
        namespace, _, pod = allocation.podref.rpartition("/")
        yield Reservation(
            domain=domain,
            address=text(address),
            range=str(network),
            network=defaults.network,
            container_id=allocation.id,
            ifname=allocation.ifname or defaults.ifname,
            namespace=namespace,
            pod=pod,
            boot=defaults.boot,
            since=defaults.since,
            segment="",
        )


def _network_name(pool: _WhereaboutsPool) -> str:
    """whereabouts names a pool `[<network_name>-]<range with ':' and '/' as '-'>`."""
    normalised = pool.spec.range.replace(":", "-").replace("/", "-")
    name = pool.metadata.name.removesuffix(normalised)
    return name.removesuffix("-") if name != pool.metadata.name else ""


def _network_of(address: int, ranges: Iterable[Network]) -> Network:
    single = Network(address, 128)
    return next((network for network in ranges if address in network), single)


def _documents(manifest: Path) -> Iterator[dict[str, Any]]:
    import yaml  # only this command reads any

    try:
        documents = list(yaml.safe_load_all(manifest.read_bytes()))
    except (yaml.YAMLError, RecursionError) as error:
        raise _unusable(manifest, f"is not YAML ({error})") from None
    for document in documents:
        if not isinstance(document, dict):
            continue
        items = document.get("items")
        for item in items if isinstance(items, list) else [document]:
            if isinstance(item, dict):
                yield item
