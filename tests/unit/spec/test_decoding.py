"""The network configuration of a call: decoded once, and what of it a removal reads."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cni.spec.config import (
    DEVICE_ID_PATHS,
    IpamConfig,
    decode,
    decode_for_removal,
)
from cni.spec.errors import CNIError, Code
from cni.spec.limits import MAX_DEPTH, MAX_TEXT
from cni.spec.request import Request

FILLER = {"x": "x" * (MAX_TEXT + 1)}
REMOVED: dict[str, Any] = {
    "cniVersion": "1.1.0",
    "name": "n1",
    "deviceID": "0000:af:06.1",
    "ipam": {"type": "whereabouts", "range": "10.0.0.0/8"},
    "runtimeConfig": {"deviceID": "0000:af:06.1", "mac": 5},
    "cni.dev/valid-attachments": [{"containerID": "c", "ifname": "i", "netns": "/x"}],
}


def large(**keys: object) -> bytes:
    """A configuration beyond the limits of an ADD."""
    raw = json.dumps({**REMOVED, **keys, **FILLER}).encode()
    with pytest.raises(CNIError):
        decode(raw)
    return raw


def refused(read: Callable[[], object]) -> CNIError:
    with pytest.raises(CNIError) as caught:
        read()
    return caught.value


def test_removal_reads_what_it_needs_of_a_configuration_beyond_the_limits() -> None:
    raw = large()
    config = decode_for_removal(raw)
    assert (config.raw, config.whole, config.version) == (raw, False, "1.1.0")
    assert config.text("name") == "n1"
    assert set(config.device_ids().values()) == {"0000:af:06.1"}
    assert config.valid_attachments == frozenset({("c", "i")})
    assert config.ipam == IpamConfig("whereabouts", ambiguous="ipam")
    assert config.keys["ipam"] == {"type": "whereabouts"}
    assert "x" not in config.keys


@pytest.mark.parametrize("key", ["ipam", "runtimeConfig", "deviceID", "pciBusID"])
@pytest.mark.parametrize("value", [5, None, [], {}, {"type": 5, "deviceID": []}, "\u00e9"])
def test_part_of_another_shape_does_not_keep_a_removal_from_the_rest(
    key: str, value: object
) -> None:
    config = decode_for_removal(large(**{key: value}))
    assert config.text("name") == "n1"
    assert config.valid_attachments == frozenset({("c", "i")})
    assert config.ipam.type in ("", "whereabouts")
    config.device_ids()


def test_version_that_is_not_a_string_is_refused_in_any_configuration() -> None:
    for config in (decode(b'{"cniVersion":5}'), decode_for_removal(large(cniVersion=5))):
        assert refused(lambda config=config: config.version).code == Code.DECODING_FAILURE  # type: ignore[misc]


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"name":5', b'{"a":"\xff"}', b"{} x"])
def test_what_is_not_a_json_object_is_refused(raw: bytes) -> None:
    assert refused(lambda: decode(raw)).code == Code.DECODING_FAILURE
    assert refused(lambda: decode_for_removal(raw)).code == Code.DECODING_FAILURE


def test_null_is_an_object_without_keys() -> None:
    assert decode(b" null ").keys == {}


def test_half_of_a_surrogate_pair_is_refused() -> None:
    assert refused(lambda: decode(b'{"x":{"y":["\\uD800x"]}}')).code == Code.DECODING_FAILURE
    assert decode(b'{"x":"\\ud83d\\ude00"}').keys == {"x": "\U0001f600"}


@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 400, "-" + "9" * 400])
def test_number_beyond_a_float_is_kept_for_others_and_is_no_option(number: str) -> None:
    config = decode(b'{"mtu":%s}' % number.encode())
    assert msgspec.json.encode(config.keys) == config.raw
    error = refused(lambda: config.at("mtu", int))
    assert error.code == Code.INVALID_CONFIG
    assert error.message == 'invalid configuration: "mtu": Number out of range'


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_constants_that_only_python_knows_are_refused(constant: str) -> None:
    error = refused(lambda: decode(b'{"mtu":%s}' % constant.encode()))
    assert error.code == Code.DECODING_FAILURE


def test_value_is_found_by_its_path() -> None:
    config = decode(b'{"args":{"cni":{"mac":"m","guid":null}},"ipam":5}')
    assert config.at("args.cni.mac", str) == "m"
    assert config.at("args.cni.guid", str) is None
    assert config.at("args.other.mac", str) is None
    assert refused(lambda: config.at("ipam.type", str)).message == (
        'invalid configuration: "ipam": Expected object, got int'
    )
    assert refused(lambda: config.at("args.cni.mac", int)).message == (
        'invalid configuration: "args.cni.mac": Expected int, got str'
    )


def test_prev_result_is_read_once() -> None:
    document = {"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.1/24"}]}
    config = decode(json.dumps({"name": "n", "prevResult": document}).encode())
    request = Request(command="CHECK", config=config, cni_version="1.0.0")
    assert request.previous_result is request.previous_result is not None
    assert request.previous_result.ips[0].address == "10.0.0.1/24"
    assert Request(command="CHECK", config=decode(b'{"prevResult":null}')).previous_result is None


def test_nesting_beyond_an_adds_limit_is_read_for_a_removal() -> None:
    deep = b'{"name":"n1","x":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}"
    assert refused(lambda: decode(deep)).code == Code.INVALID_CONFIG
    assert decode_for_removal(deep).text("name") == "n1"


def test_device_id_paths_are_those_that_removals_read() -> None:
    keys = {"deviceID": "1", "runtimeConfig": {"deviceID": "2"}, "pciBusID": "3"}
    ids = decode_for_removal(large(**keys)).device_ids()
    assert tuple(ids) == DEVICE_ID_PATHS
    assert list(ids.values()) == ["1", "2", "3"]
