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
