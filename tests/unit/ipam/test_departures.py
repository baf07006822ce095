"""The files of what is owed to whereabouts: a damaged one does not hide the others."""

import logging
from pathlib import Path

import pytest
from msgspec.structs import replace

from ipam.departures import DEPARTED, DepartedAttachment, Departures


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b'{"network": "\xff"}'])
def test_a_damaged_file_is_told_and_hides_no_other(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    departures = Departures(tmp_path)
    whole = [
        DepartedAttachment(network="fabric", container_id=name, ifname="net1") for name in "abc"
    ]
    for each in whole:
        departures.depart(each)
    damaged = sorted((tmp_path / "whereabouts").glob(f"*{DEPARTED}"))[0]
    damaged.write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        left = list(departures.departed())
    assert len(left) == 2
    assert all(each in whole for each in left)
    assert f"{damaged} is damaged" in caplog.text


def test_a_damaged_file_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    departures = Departures(tmp_path)
    departures.depart(DepartedAttachment(network="fabric", container_id="a", ifname="net1"))
    (damaged,) = (tmp_path / "whereabouts").iterdir()
    damaged.write_bytes(b"{")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):  # the agent looks every second
            assert list(departures.held()) == list(departures.departed()) == []
    assert caplog.text.count("is damaged") == 1


def test_a_second_hold_forgets_no_reservation_of_the_first(tmp_path: Path) -> None:
    departures = Departures(tmp_path)
    held = DepartedAttachment(
        network="fabric", container_id="a", ifname="net1", reserved=(("", "10.0.0.1"),)
    )
    departures.hold(held)
    departures.hold(replace(held, reserved=()))
    departures.hold(replace(held, reserved=(("", "10.0.0.2"),)))
    (found,) = departures.held()
    assert found.reserved == (("", "10.0.0.1"), ("", "10.0.0.2"))


def test_a_repeated_del_forgets_no_reservation(tmp_path: Path) -> None:
    departures = Departures(tmp_path)
    held = DepartedAttachment(
        network="fabric", container_id="a", ifname="net1", reserved=(("", "10.0.0.1"),)
    )
    told = replace(held, reserved=(), ranges=(("", "10.0.0.0/24"),))  # as a DEL has it
    departures.hold(held)
    departures.depart(told)
    (first,) = departures.departed()
    departures.depart(told)
    (found,) = departures.departed()
    assert (found.reserved, found.ranges) == (held.reserved, told.ranges)
    departures.hold(replace(held, reserved=(("", "10.0.0.2"),)))  # another ADD of the attachment
    departures.depart(told)
    assert not list(departures.held())
    (found,) = departures.departed()
    assert found.reserved == (("", "10.0.0.1"), ("", "10.0.0.2"))
    departures.settle(first)  # of what there is now the agent has not removed all
    assert list(departures.departed()) == [found]
    departures.settle(found)
    assert not list(departures.departed())
