"""`podfabric ipam`: the operator's commands for the address store of this node."""

import argparse
import os
import sys
import time

from base.paths import Paths
from cli import cluster_ipam, output
from cli.output import Table
from cni.attachments import node_facts
from cni.spec.errors import CNIError, Code, invalid_config
from ipam.addresses import parse, text
from ipam.store import repair
from ipam.store.database import DATABASE, WAL
from ipam.store.reservations import Reservation
from ipam.store.sqlite_store import SqliteStore


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    listing = commands.add_parser("list", help="every reservation of this node")
    output.add_option(listing)
    listing.set_defaults(run=_list)

    show = commands.add_parser("show", help="who holds an address")
    show.add_argument("address")
    output.add_option(show)
    show.set_defaults(run=_show)

    release = commands.add_parser("release", help="free an address by hand")
    release.add_argument("address")
    release.add_argument(
        "--network-name", help="the network name of the holder, if the address has several"
    )
    release.add_argument(
        "--force",
        action="store_true",
        help="release it even if its holder may run (it got it in this boot)",
    )
    release.set_defaults(run=_release)

    check = commands.add_parser("fsck", help="check the store; the node's calls may run meanwhile")
    check.add_argument(
        "--rebuild", action="store_true", help="move the store away and build it again"
    )
    check.set_defaults(run=_fsck)

    cluster_ipam.add_options(commands)
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    if getattr(arguments, "cluster", False):
        return cluster_ipam.run(arguments)
    try:
        code: int = arguments.run(arguments, Paths.from_environ(os.environ))
    except CNIError as error:
        sys.stderr.write(f"podfabric ipam: {error}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"podfabric ipam: {error.filename}: {error.strerror}\n")
        return 1
    return code


def _existing(paths: Paths) -> SqliteStore:
    """Open this node's address store. Raises CNIError 5 if the state directory has no files of a
    node.

    A command must not create a store in a wrong directory.
    """
    files = (paths.ipam / DATABASE, paths.ipam / WAL, paths.agent_lock)
    if not any(path.exists() for path in files):
        raise CNIError(
            Code.IO_FAILURE,
            f"{paths.ipam} has no address store: run this command in the container of "
            "podfabric's agent, or set PODFABRIC_STATE to the node's state directory",
        )
    return SqliteStore(paths.ipam, paths.boot_id())


def _list(arguments: argparse.Namespace, paths: Paths) -> int:
    _print(_existing(paths).reservations(), arguments.output, paths.boot_id())
    return 0


def _show(arguments: argparse.Namespace, paths: Paths) -> int:
    holders = _holders(arguments.address, _existing(paths))
    if not holders:
        sys.stderr.write(f"podfabric ipam: {arguments.address} is free\n")
        return 1
    _print(holders, arguments.output, paths.boot_id())
    return 0


def _release(arguments: argparse.Namespace, paths: Paths) -> int:
    store = _existing(paths)
    holders = _holders(arguments.address, store)
    if arguments.network_name is not None:
        holders = [holder for holder in holders if holder.domain == arguments.network_name]
    if not holders:
        sys.stderr.write(f"podfabric ipam: {arguments.address} is free\n")
        return 1
    if len(holders) > 1:
        domains = ", ".join(f'"{holder.domain}"' for holder in holders)
        raise invalid_config(
            f"{arguments.address} has {len(holders)} holders: choose a holder with --network-name "
            f"({domains})"
        )
    if holders[0].boot == store.boot and not arguments.force:
        raise CNIError(
            Code.ADDRESS_TAKEN,
            f"{arguments.address} may be in use: {holders[0].holder} got this address after "
            "the last boot: make sure that the pod is gone, then add --force",
        )
    store.forget(holders[0])
    output.show(f"released {holders[0].address}, held by {holders[0].holder}")
    return 0


def _fsck(arguments: argparse.Namespace, paths: Paths) -> int:
    directory = paths.ipam
    facts = node_facts.look(paths)
    # A journal proves that this is the state directory of a node.
    if not facts.journal:
        _existing(paths)
    if arguments.rebuild:
        for unseen in facts.unseen:
            output.show(f"cannot be read, and is not used: {unseen}")
        repair.rebuild(directory, output.show)
        with node_facts.store_of(paths).transaction():
            pass  # the first transaction fills the store from the node
    sound = repair.check(directory, output.show, facts)
    output.show(f"the address store in {directory} is {'sound' if sound else 'NOT sound'}")
    return 0 if sound else 1


def _holders(text_of_address: str, store: SqliteStore) -> list[Reservation]:
    try:
        address = text(parse(text_of_address))
    except ValueError as error:
        raise invalid_config(str(error)) from None
    return [held for held in store.reservations() if held.address == address]


def _print(reservations: list[Reservation], form: str, boot: str) -> None:
    if form == "json":
        output.document(reservations)
        return
    headers = ("ADDRESS", "RANGE", "POD", "NETWORK", "INTERFACE", "CONTAINER", "SINCE", "BOOT")
    rows = [_row(held, boot) for held in reservations]
    output.show(Table(headers, rows) or "this node has no reservation")


def _row(reservation: Reservation, boot: str) -> tuple[str, ...]:
    return (
        reservation.address,
        reservation.range,
        reservation.pod_name,
        reservation.network,
        reservation.ifname,
        reservation.container_id[:13],
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(reservation.since)),
        "this" if reservation.boot == boot else "earlier",
    )
