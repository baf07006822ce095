"""The verbs over a real store: whereabouts' cmd table, and what whereabouts gets wrong."""

import pytest

from cni.spec.errors import Code
from tests.unit.ipam.calls import BOOT, Calls, Json, error_of

POOL = {"range": "10.0.0.0/24"}
TINY = {"range": "10.0.0.0/30"}
ZEROS = "2001:db8:480:603d:0304:0403"
DUAL = {"ipRanges": [{"range": "192.168.10.1/24"}, {"range": "abcd::1/64"}]}


@pytest.mark.parametrize(
    ("ipam", "expected"),
    [
        (
            {"range": f"{ZEROS}:000:0000-{ZEROS}:0000:0004/64"},
            ["2001:db8:480:603d:304:403::/64"],
        ),
        (
            {"range": "192.168.1.0/24", "exclude": ["192.168.1.0/28", "192.168.1.16/28"]},
            ["192.168.1.32/24"],
        ),
        (DUAL, ["192.168.10.1/24", "abcd::1/64"]),
        (
            {"range": "abcd::1/64", "ipRanges": [{"range": "192.168.10.1/24"}]},
            ["abcd::1/64", "192.168.10.1/24"],
        ),
        (
            {"ranges": [[{"subnet": "10.1.2.0/24"}], [{"subnet": "2001:db8:1::/64"}]]},
            ["10.1.2.2/24", "2001:db8:1::2/64"],
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("version", ["0.3.1", "1.1.0"])
def test_add_delete_add_gives_this(
    node: Calls, ipam: Json, expected: list[str], version: str
) -> None:
    assert node.addresses(ipam, version=version) == expected
    node.delete(ipam, version=version)
    assert node.held() == {}
    assert node.addresses(ipam, version=version) == expected


def test_static_addresses_follow_the_ranges_and_routes_are_kept(node: Calls) -> None:
    routes = [
        {"dst": "0.0.0.0/0"},
        {"dst": "192.168.0.0/16", "gw": "10.10.5.1"},
        {"dst": "3ffe:ffff:0:1::1/64", "mtu": 1400, "table": 7},
    ]
    ipam = {
        "range": "192.168.1.44/28",
        "gateway": "192.168.1.1",
        "addresses": [
            {"address": "10.10.0.1/24", "gateway": "10.10.0.254"},
            {"address": "3ffe:ffff:0:1ff::1/64", "gateway": "3ffe:ffff::1"},
        ],
        "routes": routes,
        "dns": {"nameservers": ["10.0.0.53"], "search": ["a", "b"]},
    }
    result = node.add(ipam)
    assert [(ip.address, ip.gateway) for ip in result.ips] == [
        ("192.168.1.33/28", "192.168.1.1"),
        ("10.10.0.1/24", "10.10.0.254"),
        ("3ffe:ffff:0:1ff::1/64", "3ffe:ffff::1"),
    ]
    assert [(r.dst, r.gw, r.mtu, r.table) for r in result.routes] == [
        ("0.0.0.0/0", None, 0, None),
        ("192.168.0.0/16", "10.10.5.1", 0, None),
        ("3ffe:ffff:0:1::1/64", None, 1400, 7),
    ]
    assert result.dns.search == ("a", "b")
    assert result.interfaces == ()


def test_a_static_address_has_one_holder(node: Calls) -> None:
    ipam = {"addresses": [{"address": "10.10.0.1/24"}]}
    assert node.addresses(ipam, pod="p1") == ["10.10.0.1/24"]
    error = error_of(lambda: node.add(ipam, "c2", pod="p2"))
    assert error.code == Code.ADDRESS_TAKEN
    assert "in use by another attachment" in error.message


def test_a_range_does_not_yield_a_static_address_of_the_same_call(node: Calls) -> None:
    ipam = {**POOL, "addresses": [{"address": "10.0.0.1/24"}]}
    assert node.addresses(ipam) == ["10.0.0.2/24", "10.0.0.1/24"]


# --- overlapping ranges ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("192.168.22.0/24", "192.168.22.0/28", ["192.168.22.1/24", "192.168.22.2/28"]),
        ("2001::2:3:0/124", "2001::2:3:0/126", ["2001::2:3:1/124", "2001::2:3:2/126"]),
    ],
)
def test_overlapping_ranges_share_their_addresses(
    node: Calls, first: str, second: str, expected: list[str]
) -> None:
    given = node.addresses({"range": first}, "c1") + node.addresses({"range": second}, "c2")
    assert given == expected


def test_overlap_off_makes_each_range_its_own(node: Calls) -> None:
    private = {"enable_overlapping_ranges": False}
    assert node.addresses({"range": "192.168.33.0/24"}, "c1") == ["192.168.33.1/24"]
    assert node.addresses({"range": "192.168.33.0/28", **private}, "c3") == ["192.168.33.1/28"]
    assert node.addresses({"range": "192.168.33.0/28", **private}, "c4") == ["192.168.33.2/28"]


@pytest.mark.parametrize("first", [True, False])
def test_networks_of_the_same_range_share_it_with_any_other_options(
    node: Calls, first: bool
) -> None:
    ipam = {"range": "10.0.0.0/24", "enable_overlapping_ranges": first}
    other = {"range": "10.0.0.0/24", "enable_overlapping_ranges": not first}
    given = [
        node.addresses(which, f"c{n}")[0] for n, which in enumerate([ipam, other, ipam, other])
    ]
    assert given == [f"10.0.0.{n}/24" for n in (1, 2, 3, 4)]
    taken = error_of(lambda: node.add(other, "c9", config={"runtimeConfig": {"ips": ["10.0.0.1"]}}))
    assert taken.code == 111


def test_network_names_are_separate(node: Calls) -> None:
    assert node.addresses({**POOL, "network_name": "blue"}, "c1") == ["10.0.0.1/24"]
    assert node.addresses({**POOL, "network_name": "red"}, "c2") == ["10.0.0.1/24"]
    assert node.addresses({**POOL, "network_name": "blue"}, "c3") == ["10.0.0.2/24"]


@pytest.mark.parametrize("overlapping", [True, False])
def test_two_interfaces_of_one_pod_never_share_an_address(node: Calls, overlapping: bool) -> None:
    wide = {"range": "192.168.1.0/24", "enable_overlapping_ranges": overlapping}
    same = [node.addresses(wide, ifname=name, pod="p1")[0] for name in ("net1", "net2")]
    assert same == ["192.168.1.1/24", "192.168.1.2/24"]


@pytest.mark.parametrize("overlapping", [True, False])
def test_duplicate_ranges_of_one_attachment_yield_two_addresses(
    node: Calls, overlapping: bool
) -> None:
    ipam = {
        "range": "10.0.0.0/24",
        "ipRanges": [{"range": "10.0.0.0/24"}, {"range": "10.0.0.0/28"}],
        "enable_overlapping_ranges": overlapping,
    }
    expected = ["10.0.0.1/24", "10.0.0.2/24", "10.0.0.3/28"]
    assert node.addresses(ipam, "c1", pod="p") == expected
    assert node.addresses(ipam, "c2", pod="p") == expected


def test_the_gateway_of_a_fixed_address_is_never_handed_out(node: Calls) -> None:
    fixed = {"addresses": [{"address": "10.9.0.1/24", "gateway": "10.0.0.1"}]}
    assert node.addresses({**TINY, **fixed}) == ["10.0.0.2/30", "10.9.0.1/24"]


def test_each_family_has_its_own_gateway(node: Calls) -> None:
    ipam = {"range": "10.0.0.0/24", "gateway": "10.0.0.1", "ipRanges": [{"range": "fd00::/64"}]}
    assert [ip.gateway for ip in node.add(ipam).ips] == ["10.0.0.1", None]


@pytest.mark.parametrize("version", ["0.1.0", "0.2.0"])
def test_old_versions_take_one_address_of_each_family(node: Calls, version: str) -> None:
    assert len(node.addresses(DUAL, version=version)) == 2
    error = error_of(lambda: node.add({**DUAL, **POOL}, "c2", version=version))
    assert error.code == Code.INVALID_CONFIG
    assert "more than 1 address per family" in error.message
    assert set(node.held().values()) == {"c1"}


def test_an_interface_name_that_is_not_utf_8_is_refused(node: Calls) -> None:
    assert error_of(lambda: node.add(POOL, ifname="a\udcff")).code == Code.INVALID_ENVIRONMENT


# --- DEL -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ipam", [None, {"type": "nonsense"}, {"range": 5}, {"rnge": "x"}, POOL])
def test_del_frees_everything_under_any_later_configuration(node: Calls, ipam: Json | None) -> None:
    node.add({**DUAL, "network_name": "blue"})
    node.delete(ipam)
    assert node.held() == {}


# --- CHECK -----------------------------------------------------------------------------------


def previous(*addresses: str) -> dict[str, object]:
    ips = [{"address": address} for address in addresses]
    return {"prevResult": {"cniVersion": "1.0.0", "ips": ips}}


@pytest.mark.parametrize("addresses", [["192.168.10.1/24"], ["192.168.10.9/24"], []])
def test_check_refuses_what_the_attachment_does_not_hold(node: Calls, addresses: list[str]) -> None:
    node.add(DUAL, "other")
    error = error_of(lambda: node.check(DUAL, config=previous(*addresses)))
    assert error.code == Code.CHECK_FAILED


# --- STATUS ----------------------------------------------------------------------------------


def test_status_is_50_when_the_store_cannot_be_used(node: Calls) -> None:
    node.add(POOL)
    (node.directory / "reservations.db").write_bytes(b"\0" * 8192)
    assert error_of(lambda: node.status(POOL)).code == Code.UNAVAILABLE


def test_the_boot_is_in_the_store(node: Calls) -> None:
    node.add(POOL, pod="p", uid="u1")
    (only,) = node.store.reservations()
    assert (only.boot, only.namespace, only.pod, only.uid) == (BOOT, "ns", "p", "u1")
    assert (only.range, only.network, only.ifname) == ("10.0.0.0/24", "n1", "eth0")


def test_a_fixed_address_within_the_range_is_the_pods_in_every_sandbox(node: Calls) -> None:
    both = {"range": "10.0.0.0/24", "addresses": [{"address": "10.0.0.1/24"}]}
    first = node.addresses(both, "old", pod="p", uid="u1")
    assert first == ["10.0.0.2/24", "10.0.0.1/24"]
    assert node.addresses(both, "new", pod="p", uid="u1") == first


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"gateway": "10.0.0.1"}, "the gateway"),
        (
            {"routes": [{"dst": "10.8.0.0/16", "gw": "10.0.0.1"}]},
            'the next hop of "ipam.routes[0]"',
        ),
    ],
)
def test_no_fixed_address_is_a_next_hop(node: Calls, keys: Json, why: str) -> None:
    failure = error_of(
        lambda: node.add({**POOL, **keys, "addresses": [{"address": "10.0.0.1/24"}]})
    )
    assert f"10.0.0.1 is {why}" in failure.message
