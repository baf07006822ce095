"""Strict configurations: an error names the key."""

import json

import msgspec
import pytest

from cni.spec import config
from cni.spec.config import NetworkConfig
from cni.spec.errors import CNIError, Code


class Inner(msgspec.Struct):
    size: int = 0


class Shape(msgspec.Struct):
    mtu: int = 0
    inner: Inner = msgspec.field(default_factory=Inner)


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        (b'{"mtu":"x"}', '"mtu"'),
        (b'{"inner":{"size":[]}}', '"inner.size"'),
        (b'{"inner":[]}', '"inner"'),
    ],
)
def test_value_that_does_not_fit_is_named_by_its_path(raw: bytes, key: str) -> None:
    with pytest.raises(CNIError) as caught:
        config.convert(json.loads(raw), Shape)
    assert caught.value.code == Code.INVALID_CONFIG
    assert caught.value.message.startswith(f"invalid configuration: {key}: ")


def test_path_of_a_converted_part_starts_where_it_stood() -> None:
    with pytest.raises(CNIError, match=r'"ipam\.inner\.size"'):
        config.convert({"inner": {"size": "x"}}, Shape, "ipam")
    with pytest.raises(CNIError, match='"ipam"'):
        config.convert([], Shape, "ipam")


@pytest.mark.parametrize("key", [*sorted(config.RUNTIME_KEYS), "x", "vendor.example/pkey", "logs"])
def test_keys_of_others_pass(key: str) -> None:
    config.refuse_misspelt({key: 1}, ("pkey", "mtu", "proxy_arp", "master", "mode", "umcast"))


def test_unknown_key_that_resembles_nothing_lists_the_valid_ones() -> None:
    error = config.unknown_key("zzz", ("b", "a"), "ipam: ")
    assert error.message == 'ipam: unknown key "zzz": valid keys are a, b'


def test_calls_with_the_same_bytes_share_what_was_worked_out_of_them() -> None:
    raw = b'{"name": "shared", "type": "ipoib"}'
    worked = []

    def length(network: NetworkConfig) -> int:
        worked.append(network)
        return len(network.keys)

    first, second = config.decode(raw), config.decode(bytes(bytearray(raw)))
    assert (first.derived(length), second.derived(length)) == (2, 2)
    assert worked == [first]
    assert second is first


def test_what_cannot_be_worked_out_of_a_configuration_is_tried_again() -> None:
    raw = b'{"name": "broken", "type": "ipoib"}'

    def refuse(network: NetworkConfig) -> int:
        raise CNIError(7, "no")

    for _ in range(2):
        with pytest.raises(CNIError):
            config.decode(raw).derived(refuse)


@pytest.mark.parametrize(
    "more", [b'"prevResult": {"cniVersion": "1.0.0"}', b'"vendor": "%s"' % (b"x" * 5000)]
)
def test_a_pods_own_and_large_configurations_are_not_kept(more: bytes) -> None:
    raw = b'{"name": "own", %s}' % more
    assert config.decode(raw) == config.decode(raw)
    assert config.decode(raw) is not config.decode(raw)
