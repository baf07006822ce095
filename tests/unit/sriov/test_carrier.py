"""Waiting for carrier, before addresses are announced."""

import time
from collections.abc import Iterator

import msgspec
import pytest
from pyroute2.netlink.rtnl.ifinfmsg import IFF_LOWER_UP, IFF_RUNNING, IFF_UP

from host.errors import LinkMissing
from host.netlink import links
from host.netlink.links import Link
from tests.unit.sriov.node import POD, VF0, link
from tests.waiting import PATIENCE

WITHOUT = link("net1", VF0, flags=IFF_UP | IFF_LOWER_UP)
WITH = msgspec.structs.replace(WITHOUT, flags=IFF_UP | IFF_LOWER_UP | IFF_RUNNING)


def _shown(monkeypatch: pytest.MonkeyPatch, looks: Iterator[Link | None]) -> None:
    monkeypatch.setattr(links, "is_running", lambda route, name: True)
    monkeypatch.setattr(links, "by_index", lambda route, index: next(looks))


def test_interface_that_is_only_up_is_waited_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    _shown(monkeypatch, iter(lambda: WITHOUT, None))  # SK1
    started = time.monotonic()
    assert links.await_carrier(POD, WITHOUT, 0.2) == WITHOUT
    assert time.monotonic() - started >= 0.2


def test_carrier_ends_the_waiting(monkeypatch: pytest.MonkeyPatch) -> None:  # SK2
    _shown(monkeypatch, iter([WITHOUT, WITHOUT, WITH]))
    assert links.await_carrier(POD, WITHOUT, PATIENCE) == WITH


def test_interface_that_goes_meanwhile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _shown(monkeypatch, iter([None]))
    with pytest.raises(LinkMissing, match='interface "net1" has gone from the pod while'):
        links.await_carrier(POD, WITHOUT, PATIENCE)
