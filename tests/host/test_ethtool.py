"""Settings of drivers, read and restored, on the kernel's own veth."""

import ctypes
import fcntl
import struct
from collections.abc import Iterator

import pytest

from host import ethtool
from host.namespaces import NetworkNamespace
from host.netlink.sockets import Rtnetlink, netlink
from tests.netns import ip, namespace

GTSO, STSO = 0x1E, 0x1F  # older commands for one feature, as another program would use them


@pytest.fixture
def route() -> Iterator[Rtnetlink]:
    """A socket in a namespace with the interface "eth7"."""
    with namespace() as path:
        ip("-n", path.name, "link", "add", "eth7", "type", "veth", "peer", "name", "peer7")
        with NetworkNamespace.open(str(path)) as opened, netlink(opened) as route:
            yield route


def tso(route: Rtnetlink, command: int = GTSO, on: int = 0) -> int:
    passed = ctypes.create_string_buffer(struct.pack("=II", command, on), 8)
    fcntl.ioctl(route, 0x8946, struct.pack("=16sQ16x", b"eth7", ctypes.addressof(passed)))
    return int(struct.unpack("=II", passed.raw)[1])


def test_feature_that_was_switched_off_is_on_again(route: Rtnetlink) -> None:
    before = ethtool.settings(route, "eth7")
    assert tso(route) == 1
    tso(route, STSO, 0)
    assert ethtool.settings(route, "eth7") != before
    assert ethtool.restore(route, "eth7", before) == []
    assert tso(route) == 1
    assert ethtool.settings(route, "eth7") == before


def test_unchanged_settings_are_not_written(
    route: Rtnetlink, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ethtool.settings(route, "eth7")
    monkeypatch.setattr(ethtool, "_write", lambda *given: pytest.fail("something was written"))
    assert ethtool.restore(route, "eth7", before) == []


def test_refused_setting_is_reported_and_the_rest_is_restored(route: Rtnetlink) -> None:
    before = ethtool.settings(route, "eth7")
    assert "channels" in before
    impossible = struct.pack("=8I", 1, 1, 0, 1, 999, 999, 0, 0).hex()
    tso(route, STSO, 0)
    (refusal,) = ethtool.restore(
        route, "eth7", {"channels": impossible, **before} | {"channels": impossible}
    )
    assert refusal.startswith('restoring the channels of "eth7" (see ethtool): Invalid argument')
    assert tso(route) == 1


def test_interface_without_a_driver_has_none_of_its_settings(route: Rtnetlink) -> None:
    assert set(ethtool.settings(route, "nowhere0")) == set()
