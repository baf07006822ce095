"""Addresses that a lost machine may still use, and which are probed before their first use.

A node that has vanished without a proof that it is off may be cut off, with its pods running. So
before the controller frees a block of it, it marks the block's addresses in the status of the pool,
and only then deletes the block. Whoever leases one of them reads the pool after the lease is its
own, so it sees the mark. A mark goes when a later holder says that it has probed the address, or
uses it, without an answer: until then each further holder of the block has it, too.
"""

from collections.abc import Iterable

from ipam.addresses import Interval, parse, parse_interface, parse_interval, text
from ipam.blocks import LeasedBlock
from ipam.cluster.objects import AddressPool, BlockSpec
from ipam.ranges import common, is_within, merged, outside


def marks_of(pool: AddressPool) -> tuple[Interval, ...]:
    """The addresses of the pool that are to be probed: all, if what is written is unreadable.

    ValueError if the pool's range is unreadable, too.
    """
    try:
        return merged(map(parse_interval, pool.status.probe))
    except ValueError:
        network = parse_interface(pool.spec.range)[1]
        return (Interval(network.address, network.last),)


def written(runs: Iterable[Interval]) -> tuple[str, ...]:
    """Runs of addresses as objects have them: "10.0.0.8", "10.0.0.8-10.0.0.15"."""
    return tuple(
        text(run.first) if run.first == run.last else f"{text(run.first)}-{text(run.last)}"
        for run in runs
    )


def to_probe(pool: AddressPool, spec: BlockSpec, covered: Interval) -> tuple[Interval, ...]:
    """What of a block its holder must probe.

    The pool must have been read after the block was the holder's. A block that says `probe`, and of
    which the pool says nothing, is probed as a whole: the pool may have been made again since.
    """
    found = tuple(common([covered], marks_of(pool)))
    if spec.probe and not found:
        found = (covered,)
    if spec.sticky.reservation:
        address = parse(spec.sticky.address)
        return (Interval(address, address),) if is_within(address, found) else ()
    return found


def to_probe_again(pool: AddressPool, row: LeasedBlock) -> tuple[Interval, ...]:
    """The same of a block that this node leases again, by its row."""
    return tuple(common([row.interval], marks_of(pool)))


def to_probe_of_sticky(spec: BlockSpec) -> tuple[Interval, ...]:
    """The same of a sticky block that its last holder, or the controller, has let go: it says
    itself whether its address is to be probed."""
    address = parse(spec.sticky.address)
    return (Interval(address, address),) if spec.probe else ()


def proven(row: LeasedBlock) -> tuple[Interval, ...]:
    """The addresses of a block that need no probe."""
    return tuple(outside(row.interval, merged((*row.unprobed, *row.answered))))
