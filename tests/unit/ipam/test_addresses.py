"""Text to integers and back; whereabouts' pkg/iphelpers tables where they have a counterpart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipam.addresses import Interval, family, parse, parse_interface, parse_interval, text


def test_an_ipv4_mapped_address_is_the_ipv4_address() -> None:
    assert parse("::ffff:192.168.0.1") == parse("192.168.0.1")
    assert text(parse("::ffff:192.168.0.1")) == "192.168.0.1"
    assert str(parse_interface("::ffff:10.0.0.0/120")[1]) == "10.0.0.0/24"


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
