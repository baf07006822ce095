"""The living attachments in a GC request: a list, null and a missing key differ."""

import json
from typing import Any

import pytest

from cni.spec.config import decode
from cni.spec.errors import CNIError, Code

KEY, OLD_KEY = "cni.dev/valid-attachments", "cni.dev/attachments"
ONE = [{"containerID": "c1", "ifname": "eth0"}]
OTHER = [{"containerID": "c2", "ifname": "eth0"}]


def alive(config: dict[str, Any]) -> set[tuple[str, str]] | None:
    valid = decode(json.dumps(config).encode()).valid_attachments
    return None if valid is None else set(valid)


def test_newer_key_wins() -> None:
    assert alive({OLD_KEY: OTHER, KEY: ONE}) == {("c1", "eth0")}
    assert alive({KEY: None, OLD_KEY: OTHER}) == set()


def test_unknown_keys_of_an_attachment_are_ignored() -> None:
    assert alive({KEY: [{**ONE[0], "netns": "/x"}]}) == {("c1", "eth0")}


@pytest.mark.parametrize("value", ["c1", {}, [1], [{"containerID": "c1"}], [{"ifname": 1}], True])
def test_list_of_another_shape_removes_nothing(value: object) -> None:
    with pytest.raises(CNIError, match=f'"{KEY}": .*GC removed nothing') as caught:
        alive({KEY: value})
    assert caught.value.code == Code.INVALID_CONFIG
