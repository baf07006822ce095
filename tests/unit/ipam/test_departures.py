"""The files of what is owed to whereabouts: a damaged one does not hide the others."""

import logging
from pathlib import Path

import pytest

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
