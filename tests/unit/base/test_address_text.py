"""Which of the forms that netaddr takes are taken."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from base import address_text


@pytest.mark.parametrize(
    ("read", "written", "canonical"),
    [
        (address_text.address, "FD00:0::1", "fd00::1"),
        (address_text.address, "::ffff:10.0.0.1", "10.0.0.1"),
        (address_text.network, "10.0.0.5/24", "10.0.0.5/24"),
        (address_text.network, "::ffff:10.0.0.5/120", "10.0.0.5/24"),
        (address_text.mac, "02:00:00:00:00:0A", "02:00:00:00:00:0a"),
        (address_text.guid, "02:00:00:00:00:00:00:0A", "02:00:00:00:00:00:00:0a"),
    ],
)
def test_what_is_written_has_one_text(
    read: Callable[[str], object], written: str, canonical: str
) -> None:
    assert str(read(written)) == canonical


@pytest.mark.parametrize(
    ("read", "wrong"),
    [
        *((address_text.address, each) for each in ("10.1", "010.0.0.1", "fe80::1%eth0", "1", "")),
        *((address_text.address, each) for each in ("10.0.0.1/32", "10.0.0.1\n", "10.0.0.1\0")),
        *((address_text.network, f"10.0.0.0{each}") for each in ("", "/", "/255.0.0.0", "/+8")),
        *((address_text.network, f"10.0.0.0/{each}") for each in ("2_4", "\u0662", "33", "8/8")),
        *((address_text.mac, each) for each in ("020000000001", "2:0:0:0:0:1", "0200.0000.0001")),
        *((address_text.mac, each) for each in ("02-00-00-00-00-01", "02:00:00:00:00:01\n", "")),
        *((address_text.guid, each) for each in ("0.1.2.3", "0200000000000001", "02:00:00:00")),
    ],
)
def test_another_form_is_refused(read: Callable[[str], object], wrong: str) -> None:
    with pytest.raises(ValueError, match=r"invalid|write"):
        read(wrong)


def test_netaddr_is_imported_without_what_reads_no_address() -> None:
    code = "import ipam.addresses, host.netlink.interface_addresses, sys; "
    code += "print('netaddr.ip' in sys.modules,"
    code += " 'netaddr.eui' in sys.modules, 'netaddr.ip.sets' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "True False False\n"
