"""Text to integers and back; whereabouts' pkg/iphelpers tables where they have a counterpart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipam.addresses import Interval, Network, family, parse, parse_interface, parse_interval, text


@pytest.mark.parametrize(
    ("lower", "higher"),
    [
        ("192.168.0.0", "192.169.0.0"),
        ("::ffff:192.168.0.0", "192.169.0.0"),
        ("2000::", "2000::1"),
    ],
)
def test_addresses_are_ordered_as_numbers(lower: str, higher: str) -> None:
    assert parse(lower) < parse(higher)


def test_an_ipv4_mapped_address_is_the_ipv4_address() -> None:
    assert parse("::ffff:192.168.0.1") == parse("192.168.0.1")
    assert text(parse("::ffff:192.168.0.1")) == "192.168.0.1"
    assert str(parse_interface("::ffff:10.0.0.0/120")[1]) == "10.0.0.0/24"


@pytest.mark.parametrize(
    ("address", "next_one"),
    [
        ("192.168.2.23", "192.168.2.24"),
        ("ff02::1", "ff02::2"),
        ("ff02::ff", "ff02::100"),
        ("192.168.2.255", "192.168.3.0"),
        ("192.168.255.255", "192.169.0.0"),
        ("ff02::ffff", "ff02::1:0"),
        ("ff02::ffff:ffff", "ff02::1:0:0"),
    ],
)
def test_the_next_address_carries(address: str, next_one: str) -> None:
    assert text(parse(address) + 1) == next_one
    assert text(parse(next_one) - 1) == address


@pytest.mark.parametrize(
    ("address", "base", "offset"),
    [
        ("192.168.1.1", "192.168.1.0", 1),
        ("::ffff:192.168.1.1", "192.168.1.0", 1),
        ("192.168.4.0", "192.168.3.0", 256),
        ("192.168.2.255", "192.168.1.0", 511),
        ("192.168.2.255", "192.168.2.1", 254),
        ("ff02::ff", "ff02::1", 254),
        ("192.168.3.0", "192.168.2.1", 255),
        ("ff02::100", "ff02::1", 255),
        ("ff02::1:0", "ff02::1", 65535),
        ("192.168.2.1", "192.168.1.1", 256),
        ("2000::1:0", "2000::1", 65535),
        ("192.168.1.5", "192.168.0.10", 251),
        ("10.0.1.1", "10.0.0.2", 255),
    ],
)
def test_offsets_borrow_and_carry(address: str, base: str, offset: int) -> None:
    assert parse(address) - parse(base) == offset
    assert text(parse(base) + offset) == text(parse(address))


@pytest.mark.parametrize(
    ("cidr", "network", "last"),
    [
        ("192.168.0.0/32", "192.168.0.0/32", "192.168.0.0"),
        ("192.168.0.0/31", "192.168.0.0/31", "192.168.0.1"),
        ("192.168.0.0/30", "192.168.0.0/30", "192.168.0.3"),
        ("192.168.0.0/23", "192.168.0.0/23", "192.168.1.255"),
        ("192.168.2.225/28", "192.168.2.224/28", "192.168.2.239"),
        ("2000::/128", "2000::/128", "2000::"),
        ("2000::/127", "2000::/127", "2000::1"),
        ("2000::/126", "2000::/126", "2000::3"),
        ("2000::/64", "2000::/64", "2000::ffff:ffff:ffff:ffff"),
        ("0.0.0.0/0", "0.0.0.0/0", "255.255.255.255"),
    ],
)
def test_a_network_has_its_host_bits_masked_and_ends_at_its_broadcast(
    cidr: str, network: str, last: str
) -> None:
    parsed = parse_interface(cidr)[1]
    assert (str(parsed), text(parsed.last)) == (network, last)


@pytest.mark.parametrize(
    ("given_text", "canonical"),
    [
        ("00192.00168.1.5", "192.168.1.5"),
        ("000000192.168.1.25", "192.168.1.25"),
        ("00192.00168.01.209", "192.168.1.209"),
        ("2001:db8:480:603d:0304:0403:000:0004", "2001:db8:480:603d:304:403:0:4"),
        ("FD00::1", "fd00::1"),
    ],
)
def test_leading_zeros_are_decimal(given_text: str, canonical: str) -> None:
    assert text(parse(given_text)) == canonical


@pytest.mark.parametrize(
    "wrong",
    ["", "10.0.0", "10.0.0.256", "10.0.0.0.1", "10.0.0.-1", "1e1.0.0.1", "100::2::1",
     "fe80::1%eth0", "10.0.0.1/24", " 10.0.0.1", "::g", "١.0.0.1"],
)  # fmt: skip
def test_what_is_no_address_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="invalid IP address"):
        parse(wrong)


@pytest.mark.parametrize(
    "wrong", ["10.0.0.5", "10.0.0.0/33", "10.0.0.0/", "10.0.0.0/+8", "::/129", "::ffff:10.0.0.0/90"]
)
def test_what_is_no_network_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="invalid CIDR"):
        parse_interface(wrong)


@pytest.mark.parametrize(
    ("given_text", "first", "last"),
    [
        ("192.168.2.229/30", "192.168.2.228", "192.168.2.231"),
        ("192.168.0.1", "192.168.0.1", "192.168.0.1"),
        ("10.0.0.1-10.0.0.3", "10.0.0.1", "10.0.0.3"),
        ("10.0.0.1 - 10.0.0.3", "10.0.0.1", "10.0.0.3"),
        ("fd00::-fd00::f", "fd00::", "fd00::f"),
        ("caa5::0/113", "caa5::", "caa5::7fff"),
    ],
)
def test_an_interval_is_a_network_an_address_or_two(given_text: str, first: str, last: str) -> None:
    assert parse_interval(given_text) == Interval(parse(first), parse(last))


@pytest.mark.parametrize("wrong", ["10.0.0.3-10.0.0.1", "10.0.0.1-fd00::1", "10.0.0.1-", "-"])
def test_an_interval_that_runs_backwards_or_across_families_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_interval(wrong)


@given(st.integers(0, 2**128 - 1))
def test_every_address_comes_back_from_its_text(address: int) -> None:
    assert parse(text(address)) == address
    assert family(address) == (6 if ":" in text(address) else 4)


def test_membership() -> None:
    network = Network(parse("10.0.0.0"), 120)
    assert parse("10.0.0.255") in network
    assert parse("10.0.1.0") not in network
