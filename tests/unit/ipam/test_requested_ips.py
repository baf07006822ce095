"""Addresses that a pod asks for by name."""

import pytest

from cni.spec.errors import Code
from tests.unit.ipam.calls import NEXT_BOOT, Calls, How, error_of

POOL = {
    "range": "10.0.0.0/24",
    "gateway": "10.0.0.1",
    "exclude": ["10.0.0.8-10.0.0.15"],
    "routes": [{"dst": "10.7.0.0/16"}, {"dst": "10.8.0.0/16", "gw": "10.0.0.7"}],
}
DUAL = {**POOL, "ipRanges": [{"range": "fd00::/64"}]}


@pytest.mark.parametrize(
    "how",
    [
        {"args": "IP=10.0.0.77"},
        {"args": "IP=10.0.0.77/24"},
        {"config": {"runtimeConfig": {"ips": ["10.0.0.77"]}}},
        {"config": {"args": {"cni": {"ips": ["10.0.0.77/24"]}}}},
        {"args": "IP=10.0.0.77", "config": {"runtimeConfig": {"ips": ["10.0.0.77/24"]}}},
    ],
)
def test_a_requested_address_is_what_its_range_yields(node: Calls, how: How) -> None:
    assert node.addresses(POOL, **how) == ["10.0.0.77/24"]
    assert node.held() == {"10.0.0.77": "c1"}


def test_requests_go_to_their_ranges_and_the_rest_is_as_usual(node: Calls) -> None:
    assert node.addresses(DUAL, args="IP=fd00::9/64,10.0.0.99") == [
        "10.0.0.99/24",
        "fd00::9/64",
    ]
    assert node.addresses(DUAL, "c2", args="IP=fd00::a") == ["10.0.0.2/24", "fd00::a/64"]


@pytest.mark.parametrize(
    ("requested", "code", "seen"),
    [
        (
            "10.0.1.1",
            Code.INVALID_CONFIG,
            "is in no range of the network: request an address in 10.0.0.0/24 (10.0.0.1-",
        ),
        ("10.0.0.0", Code.INVALID_CONFIG, "is in no range"),
        ("10.0.0.1", Code.INVALID_CONFIG, "is the gateway"),
        ("10.0.0.7", Code.INVALID_CONFIG, 'is the next hop of "ipam.routes[1]": request another'),
        ("10.0.0.9", Code.INVALID_CONFIG, "excluded by ipam.exclude (10.0.0.8-10.0.0.15)"),
        ("10.0.0.20,10.0.0.21", Code.INVALID_CONFIG, "10.0.0.20 are in one range set"),
        ("10.0.0", Code.INVALID_ENVIRONMENT, '"CNI_ARGS IP": invalid IP address: 10.0.0'),
    ],
)
def test_a_request_that_cannot_be_is_refused(
    node: Calls, requested: str, code: Code, seen: str
) -> None:
    error = error_of(lambda: node.add(POOL, args=f"IP={requested}"))
    assert (error.code, seen in error.message) == (code, True), error.message
    assert node.held() == {}


def test_a_requested_address_of_a_dead_boot_is_granted(node: Calls) -> None:
    node.add(POOL, args="IP=10.0.0.77", pod="p")
    node.boot = NEXT_BOOT
    assert node.addresses(POOL, "c2", args="IP=10.0.0.77", pod="q") == ["10.0.0.77/24"]


def test_a_pod_that_asks_again_in_a_new_sandbox_keeps_it(node: Calls) -> None:
    node.add(POOL, args="IP=10.0.0.77", pod="p")
    assert node.addresses(POOL, "c2", args="IP=10.0.0.77", pod="p") == ["10.0.0.77/24"]
    assert node.held() == {"10.0.0.77": "c2"}


def test_a_request_wins_over_the_address_of_the_former_sandbox(node: Calls) -> None:
    node.add(POOL, "old", pod="p")
    assert node.addresses(POOL, "new", args="IP=10.0.0.77", pod="p") == ["10.0.0.77/24"]
    assert node.held() == {"10.0.0.2": "old", "10.0.0.77": "new"}


def test_without_ranges_a_request_is_an_address_of_its_own(node: Calls) -> None:
    how: How = {"args": "IP=10.5.0.9/16,fd00::9/64;GATEWAY=10.5.0.1"}
    result = node.add({}, **how)
    assert [(ip.address, ip.gateway) for ip in result.ips] == [
        ("10.5.0.9/16", "10.5.0.1"),
        ("fd00::9/64", None),
    ]
    assert error_of(lambda: node.add({}, "c2", **how)).code == Code.ADDRESS_TAKEN


def test_without_ranges_a_request_for_a_next_hop_is_refused(node: Calls) -> None:
    error = error_of(lambda: node.add({"routes": POOL["routes"]}, args="IP=10.0.0.7/24"))
    assert 'is the next hop of "ipam.routes[1]": ' in error.message


def test_without_ranges_a_request_needs_a_prefix(node: Calls) -> None:
    error = error_of(lambda: node.add({}, args="IP=10.5.0.9"))
    assert "needs a prefix length" in error.message


def test_the_requests_gateway_is_for_its_family(node: Calls) -> None:
    result = node.add(DUAL, args="IP=10.0.0.77,fd00::9;GATEWAY=10.0.0.254")
    assert [ip.gateway for ip in result.ips] == ["10.0.0.254", None]
    error = error_of(lambda: node.add(DUAL, "c2", args="IP=10.0.0.78;GATEWAY=10.0.0.78"))
    assert "is the gateway" in error.message


def test_unknown_arguments_need_ignore_unknown(node: Calls) -> None:
    assert node.addresses(POOL, args="FOO=BAR;ip=10.0.0.99") == ["10.0.0.2/24"]
