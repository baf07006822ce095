"""Reads one range of a configuration, in whereabouts' or host-local's spelling."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from cni.spec import limits
from cni.spec.config import convert, unknown_key
from cni.spec.errors import invalid_config
from ipam.addresses import Interval, Network, family, parse, parse_interface, parse_interval
from ipam.ranges import Range, RangeSet, merged, never_usable, of_network

T = TypeVar("T")
Section = dict[str, Any]


class RangeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of a range. If a key has two spellings, only one of them may be present."""

    range: str = ""
    range_start: str = ""
    range_end: str = ""
    exclude: Annotated[tuple[str, ...], Meta(max_length=limits.EXCLUSIONS)] = ()
    gateway: str = ""
    use_all_addresses: bool | None = None
    subnet: str = ""
    rangeStart: str = ""
    rangeEnd: str = ""


def section(written: Mapping[str, Any], shape: type[T], path: str, also: Collection[str] = ()) -> T:
    """`written` as a `shape`. A null is a missing key. Raises CNIError 7 for an unknown key."""
    keys = _keys_of(shape)  # type: ignore[arg-type] # a class is hashable
    for key in written:
        if key not in keys:
            raise unknown_key(key, keys | set(also), f"{path}: ")
    present = {key: value for key, value in written.items() if value is not None}
    return convert(present, shape, path)


@cache  # msgspec computes the fields at each call
def _keys_of(shape: type) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(shape))


class RangeReader:
    """Reads the ranges of a configuration. The limits apply to all ranges of a reader together.

    `gateway` is the default gateway for ranges of the same family. With `use_all`, pods may get
    network and broadcast addresses.
    """

    def __init__(
        self, domain: Callable[[Network], str], gateway: int | None, *, use_all: bool
    ) -> None:
        self.domain = domain
        self.gateway = gateway
        self.use_all = use_all
        self.notes: list[str] = []
        self._ranges = self._exclusions = 0

    def set_of(self, ranges: Sequence[Section], path: str) -> RangeSet:
        """Read a range set, which has ranges of one family. Raises CNIError 7."""
        if not ranges:
            raise invalid_config(f'"{path}" is an empty range set: add a range, or remove the set')
        read = []
        for index, written in enumerate(ranges):
            where = f"{path}[{index}]"
            read.append(self.read(section(written, RangeOptions, where), where))
        if len({range_.family for range_ in read}) > 1:
            raise invalid_config(
                f'"{path}" mixes IPv4 and IPv6 ranges: write a range set for each family'
            )
        return RangeSet(tuple(read))

    def read(self, options: RangeOptions, path: str) -> Range:
        """One range. Raises CNIError 7."""
        self._ranges += 1
        if self._ranges > limits.RANGES:
            raise invalid_config(
                f'"{path}": the network has more than {limits.RANGES} ranges: remove ranges'
            )
        self._exclusions += len(options.exclude)
        if self._exclusions > limits.EXCLUSIONS:
            raise invalid_config(
                f'"{path}.exclude": the network has more than {limits.EXCLUSIONS} exclusions: '
                'join adjacent exclusions, as in "10.0.0.4-10.0.0.9"'
            )
        range_key, range_text = _spelling(options, path, "range", "subnet")
        start_key, start_text = _spelling(options, path, "range_start", "rangeStart")
        end_key, end_text = _spelling(options, path, "range_end", "rangeEnd")
        if not range_text:
            raise invalid_config(f'"{path}": "range" is missing: add the key')
        start, end = address_at(start_text, start_key), address_at(end_text, end_key)
        try:
            network, dashed = network_of(range_text)
        except ValueError as error:
            raise invalid_config(f'"{range_key}": {error}') from None
        if dashed:
            if (start, end) not in ((None, None), dashed):
                self.notes.append(
                    f"{range_key} has a start and an end: {start_key} and {end_key} are ignored"
                )
            start, end = dashed.first, dashed.last
            start_key = end_key = range_key
        use_all = self.use_all if options.use_all_addresses is None else options.use_all_addresses
        try:
            first, last = of_network(network, start=start, end=end, use_all=use_all)
        except ValueError as error:
            raise invalid_config(
                f'"{_blamed(range_key, start_key, end_key, error)}": {error}'
            ) from None
        return Range(
            network=network,
            first=first,
            last=last,
            excluded=merged((*_excluded(options.exclude, path), *never_usable(network))),
            gateway=self._gateway(options, path, network, use_all=use_all),
            domain=self.domain(network),
            where=range_key,
        )

    def _gateway(
        self, options: RangeOptions, path: str, network: Network, *, use_all: bool
    ) -> int | None:
        if options.gateway:
            key = f"{path}.gateway"
            gateway = address_at(options.gateway, key)
            if gateway is not None and family(gateway) != family(network.address):
                raise invalid_config(
                    f'"{key}" is an IPv{family(gateway)} address, but the range {network} is not '
                    f"IPv{family(gateway)}: write a gateway of the same family as the range"
                )
            return gateway
        if self.gateway is not None and family(self.gateway) == family(network.address):
            return self.gateway
        if options.subnet and not use_all:
            # host-local's default gateway for "subnet". Existing bridges have this address.
            return network.address + 1
        return None


def _spelling(options: RangeOptions, path: str, *keys: str) -> tuple[str, str]:
    """The JSON path and the value of the one key that is set.

    If none is set, uses the first of `keys`.
    """
    used = [key for key in keys if getattr(options, key)]
    if len(used) > 1:
        raise invalid_config(f'"{path}" has "{used[0]}" and "{used[1]}": remove one of them')
    key = used[0] if used else keys[0]
    value: str = getattr(options, key)
    return f"{path}.{key}", value


def address_at(written: str, key: str) -> int | None:
    """The address in `written`; `None` if `written` is empty. Raises CNIError 7."""
    if not written:
        return None
    try:
        return parse(written)
    except ValueError as error:
        raise invalid_config(f'"{key}": {error}') from None


def network_of(written: str) -> tuple[Network, Interval | None]:
    """Read `10.0.0.0/24`, or whereabouts' `10.0.0.5-10.0.0.9/24`. Raises ValueError."""
    first_text, dash, rest = written.partition("-")
    if not dash:
        return parse_interface(written)[1], None
    last, network = parse_interface(rest.strip())
    first = parse(first_text.strip())
    if first not in network:
        raise ValueError(
            f"invalid range start for CIDR {network}: {first_text.strip()} is outside of this CIDR"
        )
    return network, Interval(first, last)


def _excluded(exclude: Sequence[str], path: str) -> list[Interval]:
    intervals = []
    for index, written in enumerate(exclude):
        try:
            intervals.append(parse_interval(written))
        except ValueError as error:
            raise invalid_config(
                f'could not parse exclude range "{written}" ("{path}.exclude[{index}]"): {error}'
            ) from None
    return intervals


def _blamed(range_key: str, start_key: str, end_key: str, error: ValueError) -> str:
    text = str(error)
    if text.startswith(("invalid range start", "range start")):
        return start_key
    return end_key if text.startswith("invalid range end") else range_key
