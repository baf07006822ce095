"""Results against the output of the reference's own types (pkg/types/{020,040,100})."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cni.spec import result as results
from cni.spec.entry import VERSIONS
from cni.spec.errors import CNIError, Code
from cni.spec.result import DNS, Interface, IPConfig, Result, Route
from tests.unit.spec.golden import (
    DNS_VECTOR,
    FAMILY_020,
    FAMILY_040,
    FAMILY_100,
    GOLDEN_020,
    GOLDEN_100,
)


def parse(document: dict[str, Any], version: str = "1.1.0") -> Result:
    return results.decode(json.dumps(document).encode(), version)


def printed(result: Result, version: str) -> dict[str, Any]:
    document = json.loads(results.encode(result, version))
    assert isinstance(document, dict)
    return document


@pytest.mark.parametrize("version", FAMILY_020)
def test_result_without_an_address_cannot_be_printed_in_the_oldest_versions(version: str) -> None:
    with pytest.raises(CNIError, match="cannot convert: no valid IP addresses") as caught:
        results.encode(parse({"cniVersion": "1.1.0", "interfaces": [{"name": "net1"}]}), version)
    assert caught.value.code == Code.INVALID_CONFIG


@pytest.mark.parametrize("version", FAMILY_040)
def test_dns_is_always_printed_from_0_3_0_to_0_4_0(version: str) -> None:
    result = parse({"cniVersion": "1.1.0", "interfaces": [{"name": "net1"}]})
    expected = {"cniVersion": version, "interfaces": [{"name": "net1"}], "dns": {}}
    assert printed(result, version) == expected


@pytest.mark.parametrize("version", FAMILY_100)
def test_empty_dns_is_not_printed_from_1_0_0(version: str) -> None:
    result = parse({"cniVersion": "1.1.0", "interfaces": [{"name": "net1"}]})
    assert printed(result, version) == {"cniVersion": version, "interfaces": [{"name": "net1"}]}


def test_routes_of_a_family_without_an_address_are_dropped_in_0_2_0() -> None:
    result = Result(ips=(IPConfig("fd00::3/64"),), routes=(Route("10.0.0.0/8"),))
    expected = {"cniVersion": "0.2.0", "ip6": {"ip": "fd00::3/64"}, "dns": {}}
    assert printed(result, "0.2.0") == expected


def test_unknown_target_version_is_an_error() -> None:
    with pytest.raises(CNIError, match=r"no converter for CNI result version .* to 9\.9\.9"):
        results.encode(Result(), "9.9.9")


def test_address_family_is_dropped_on_the_way_up() -> None:
    old = {"cniVersion": "0.4.0", "ips": [{"version": "4", "address": "10.1.2.3/24"}], "dns": {}}
    expected = {"cniVersion": "1.0.0", "ips": [{"address": "10.1.2.3/24"}]}
    assert printed(parse(old, "0.4.0"), "1.0.0") == expected


@pytest.mark.parametrize("version", FAMILY_020)
def test_oldest_results_become_lists_v4_first(version: str) -> None:
    old = {"cniVersion": version, **GOLDEN_020}
    expected = {
        "cniVersion": "1.0.0",
        "ips": [
            {"address": "10.1.2.3/24", "gateway": "10.1.2.1"},
            {"address": "fd00::3/64", "gateway": "fd00::1"},
        ],
        "routes": [
            {"dst": "0.0.0.0/0"},
            {"dst": "192.168.0.0/16", "gw": "10.1.2.9"},
            {"dst": "fd01::/64", "gw": "fd00::9"},
        ],
        "dns": DNS_VECTOR,
    }
    assert printed(parse(old, version), "1.0.0") == expected


def test_key_ip_of_0_3_0_holds_no_addresses() -> None:
    """As for the reference's types: 0.3.0 as published named the list `ip` by mistake."""
    assert parse({"cniVersion": "0.3.0", "ip": [{"address": "10.1.2.3/24"}]}, "0.3.0").ips == ()


def test_null_lists_are_empty() -> None:
    document = {"interfaces": None, "ips": None, "routes": None, "dns": None}
    assert parse(document, "1.0.0") == Result()


def test_zero_of_a_pointer_is_kept_and_of_a_number_omitted() -> None:
    route = {"dst": "10.0.0.0/8", "mtu": 0, "advmss": 0, "priority": 0, "table": 0, "scope": 0}
    document = printed(parse({"routes": [route]}), "1.1.0")
    assert document["routes"] == [{"dst": "10.0.0.0/8", "table": 0, "scope": 0}]
    document = printed(parse({"routes": [{"dst": "10.0.0.0/8"}]}), "1.1.0")
    assert document["routes"] == [{"dst": "10.0.0.0/8"}]


@pytest.mark.parametrize("number", [-1, 1 << 32, 1 << 70])
@pytest.mark.parametrize("key", ["mtu", "advmss", "priority", "table", "scope"])
def test_a_number_of_a_route_that_no_kernel_takes_is_an_error_with_its_key(
    key: str, number: int
) -> None:
    with pytest.raises(CNIError, match=rf"\$\.routes\[0\]\.{key}") as refused:
        parse({"routes": [{"dst": "10.0.0.0/8", key: number}]}, "1.1.0")
    assert refused.value.code == Code.DECODING_FAILURE


def test_interface_index_of_minus_one_survives() -> None:
    result = parse({"ips": [{"interface": -1, "address": "10.1.2.3/24"}]})
    assert printed(result, "0.4.0")["ips"][0]["interface"] == -1


@pytest.mark.parametrize(
    ("given_text", "canonical"),
    [
        ("::ffff:10.1.2.3/120", "10.1.2.3/24"),
        ("10.1.2.3/24", "10.1.2.3/24"),
        ("FD00:0:0::3/64", "fd00::3/64"),
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("::/0", "::/0"),
    ],
)
def test_addresses_are_rendered_in_canonical_text(given_text: str, canonical: str) -> None:
    assert parse({"ips": [{"address": given_text}]}).ips[0].address == canonical


@pytest.mark.parametrize(
    "address",
    [
        "10.1.2.3",
        "10.01.2.3/24",
        "10.1.2.3/33",
        "10.1.2.3/",
        "10.1.2.3/-1",
        "10.1.2.3/+1",
        "10.1.2.3/255.255.255.0",
        "10.1.2/24",
        "fd00::3/129",
        "fe80::1%eth0/64",
        "/24",
        "",
        "10.1.2.3/" + "9" * 5000,
    ],
)
def test_address_that_is_no_cidr_is_a_decoding_failure(address: str) -> None:
    for place in ({"ips": [{"address": address}]}, {"routes": [{"dst": address}]}):
        with pytest.raises(CNIError) as caught:
            parse(place)
        assert caught.value.code == Code.DECODING_FAILURE


@pytest.mark.parametrize("gateway", ["10.1.2.1/24", "fe80::1%eth0", "10.1.2", "gw"])
def test_gateway_that_is_no_address_is_a_decoding_failure(gateway: str) -> None:
    for place in (
        {"ips": [{"address": "10.1.2.3/24", "gateway": gateway}]},
        {"routes": [{"dst": "10.0.0.0/8", "gw": gateway}]},
    ):
        with pytest.raises(CNIError) as caught:
            parse(place)
        assert caught.value.code == Code.DECODING_FAILURE


@pytest.mark.parametrize("version", [*FAMILY_040, *FAMILY_100])
def test_later_versions_need_no_address(version: str) -> None:
    results.require_convertible(version, has_addresses=False)


OURS = Result(
    interfaces=(Interface("net1", sandbox="/var/run/netns/T"),),
    ips=(IPConfig("10.9.0.1/24", interface=0),),
    routes=(Route("10.8.0.0/16"),),
)


def test_nothing_of_ours_leaves_the_previous_result_as_it_was() -> None:
    previous = {key: value for key, value in GOLDEN_100.items() if key != "cniVersion"}
    merged = results.after_previous(previous, Result(), "1.0.0")
    assert merged == {**previous, "cniVersion": "1.0.0"}


def test_oldest_results_are_merged_by_family() -> None:
    """Only one address of a family fits: the earlier plugin's stays."""
    previous = {"cniVersion": "0.2.0", "ip6": {"ip": "fd00::3/64"}}
    merged = results.after_previous(previous, OURS, "0.2.0")
    assert merged["ip6"] == {"ip": "fd00::3/64"}
    assert merged["ip4"]["ip"] == "10.9.0.1/24"
    previous = {"cniVersion": "0.2.0", "ip4": {"ip": "10.1.2.3/24"}}
    assert results.after_previous(previous, OURS, "0.2.0")["ip4"] == {"ip": "10.1.2.3/24"}


# Everything that a result may hold, and its way through every version.

names = st.text("abcdefghijklmnopqrstuvwxyz0123456789.-", min_size=1, max_size=15)
v4 = st.ip_addresses(v=4).map(str)
v6 = st.ip_addresses(v=6).map(str).filter(lambda text: not text.startswith("::ffff:"))
cidrs = st.one_of(
    st.builds("{}/{}".format, v4, st.integers(0, 32)),
    st.builds("{}/{}".format, v6, st.integers(0, 128)),
)
numbers = st.integers(0, 2**31 - 1)
interfaces = st.builds(
    Interface, name=names, mac=names, mtu=numbers, sandbox=names, socketPath=names, pciID=names
)
ips = st.builds(
    IPConfig,
    address=cidrs,
    gateway=st.none() | v4 | v6,
    interface=st.none() | st.integers(-1, 3),
)
routes = st.builds(
    Route,
    dst=cidrs,
    gw=st.none() | v4 | v6,
    mtu=numbers,
    advmss=numbers,
    priority=numbers,
    table=st.none() | numbers,
    scope=st.none() | st.sampled_from((0, 253, 254)),
)
texts = st.lists(names, max_size=2).map(tuple)
whole_results = st.builds(
    Result,
    interfaces=st.lists(interfaces, max_size=3).map(tuple),
    ips=st.lists(ips, max_size=4).map(tuple),
    routes=st.lists(routes, max_size=4).map(tuple),
    dns=st.builds(DNS, nameservers=texts, domain=names, search=texts, options=texts),
)


@given(whole_results, st.sampled_from(FAMILY_100))
def test_newest_versions_lose_nothing(result: Result, version: str) -> None:
    assert results.decode(results.encode(result, version), version) == result


@given(whole_results, st.sampled_from(FAMILY_040))
def test_middle_versions_lose_interface_attributes_only(result: Result, version: str) -> None:
    plain = tuple(
        Interface(interface.name, interface.mac, sandbox=interface.sandbox)
        for interface in result.interfaces
    )
    expected = Result(interfaces=plain, ips=result.ips, routes=result.routes, dns=result.dns)
    assert results.decode(results.encode(result, version), version) == expected


@given(whole_results, st.sampled_from(VERSIONS))
def test_printing_what_was_read_prints_the_same(result: Result, version: str) -> None:
    try:
        first = results.encode(result, version)
    except CNIError:
        assert version in FAMILY_020
        assert not result.ips
        return
    assert results.encode(results.decode(first, version), version) == first
