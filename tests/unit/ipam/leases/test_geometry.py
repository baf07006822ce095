"""Where blocks lie, the bitmap of leased ones, and durations."""

import pytest
from msgspec.structs import replace

from ipam.addresses import parse, parse_interface, text
from ipam.leases.block_layout import Geometry, free_map, interval, is_leased, read_map
from ipam.leases.objects import AddressBlock, BlockSpec, Holder
from ipam.leases.pool_cache import seconds
from kube.resources import Meta


def _geometry(cidr: str, size: int) -> Geometry:
    return Geometry(parse_interface(cidr)[1], size)


@pytest.mark.parametrize(
    ("cidr", "size", "total", "name"),
    [
        ("10.64.0.0/16", 32, 2048, "blue.10.64.0.64-27"),
        ("10.0.0.0/26", 1, 64, "blue.10.0.0.2-32"),
        ("fd00::/120", 64, 4, "blue.fd00--80-122"),
        ("fd00::/64", 128, 1 << 57, "blue.fd00--100-121"),
    ],
)
def test_blocks_are_aligned_and_named_by_their_first_address(
    cidr: str, size: int, total: int, name: str
) -> None:
    geometry = _geometry(cidr, size)
    assert geometry.total == total
    assert geometry.name("blue", 2) == name
    assert geometry.index(geometry.block(2).last) == 2
    assert geometry.index(geometry.block(2).last + 1) == 3


def test_the_free_map_shows_the_blocks_that_are_not_leased() -> None:
    written = free_map([0, 9, 10], 12)
    assert written == "AQY="
    bits = read_map(written, 12)
    assert [index for index in range(12) if is_leased(bits, index)] == [0, 9, 10]
    with pytest.raises(ValueError, match="is not the size for 30 blocks"):
        read_map(written, 30)


def test_the_interval_of_a_block_that_is_not_aligned_is_an_error() -> None:
    spec = BlockSpec(pool="p", range="10.0.0.8/29", holder=Holder(instance="i", node="n"))
    block = AddressBlock(metadata=Meta(name="s.10.0.0.8-29"), spec=spec)
    assert [text(each) for each in interval(block)] == ["10.0.0.8", "10.0.0.15"]
    assert interval(block).first == parse("10.0.0.8")
    wide = replace(block, spec=replace(spec, range="10.0.0.8/28"))
    with pytest.raises(ValueError, match="host bits set"):
        interval(wide)


def test_durations_are_read_as_go_writes_them() -> None:
    assert [seconds(each) for each in ("10m", "1h30m", "1.5s", "250ms", "0")] == [
        600.0,
        5400.0,
        1.5,
        0.25,
        0.0,
    ]
    for wrong in ("", "10", "m", "-5s", "10 m", "1d"):
        with pytest.raises(ValueError, match="write it as"):
            seconds(wrong)
