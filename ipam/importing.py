"""Reservations out of host-local's store: the files in its directory of a network."""

from collections.abc import Iterable
from pathlib import Path

from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError, Code
from ipam.addresses import Network, parse, text
from ipam.ranges import domain_of
from ipam.store import Reservation

UNNAMED = " imported"
"""The network of what was imported from a store that knows none: no network has this name, since it
begins with a space. Container and interface tell which attachment it is."""


def host_local(
    directory: Path, ranges: Iterable[Network], boot: str, notes: list[str]
) -> list[Reservation]:
    """The reservations below `<dataDir>/<network>`: files named by address (backend/disk).

    Each holds `<container id>\\r\\n<ifname>`, before version 0.8 the container id alone. `ranges`
    are what the addresses may be from. CNIError 6 if host-local made no file there.
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
        single = Network(address, 128)
        network = next((network for network in ranges if address in network), single)
        reservations.append(
            Reservation(
                domain=domain_of("", network, shared=True),
                address=text(address),
                range=str(network),
                network=directory.resolve().name,
                container_id=container_id.strip(),
                ifname=ifname.strip() or "eth0",
                boot=boot,
                since=int(path.stat().st_mtime),
            )
        )
    if not is_theirs:
        raise CNIError(
            Code.DECODING_FAILURE,
            f"{directory} has no file that is named by an address, so nothing was imported: name "
            "host-local's directory of a network",
        )
    return reservations


def unnamed(attachment: Attachment) -> Attachment:
    """The attachment as an import has it that knew no network."""
    return Attachment(UNNAMED, attachment.container_id, attachment.ifname)
