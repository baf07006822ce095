"""Strictness: what is wrong is named by its JSON path, with the nearest valid key."""

import json
from pathlib import Path
from typing import Any

import pytest

from cni.spec.config import decode
from cni.spec.errors import CNIError, Code
from ipam.addresses import text
from ipam.config.options import WITHOUT_EFFECT, IpamOptions, read
from ipam.config.resolv_conf import read as read_resolv_conf


def options(ipam: object, **config: object) -> IpamOptions:
    return read(decode(json.dumps({"name": "n1", "ipam": ipam, **config}).encode()))


def with_type(**ipam: object) -> dict[str, object]:
    return {"type": "whereabouts", **ipam}


R = {"range": "10.0.0.0/24"}


@pytest.mark.parametrize(
    ("ipam", "seen"),
    [
        ({"rnge": "10.0.0.0/24"}, 'ipam: unknown key "rnge": did you mean "range"?'),
        ({**R, "kubernets": {}}, 'did you mean "kubernetes"?'),
        ({**R, "zzz": 1}, 'unknown key "zzz": valid keys are'),
        ({"ipRanges": [R, {**R, "range_strt": "x"}]}, "ipam.ipRanges[1]: unknown"),
        ({"ipRanges": [R, {"range": "10.1.0.0/24", "range_start": "10.0.0"}]},
         '"ipam.ipRanges[1].range_start": invalid IP address: 10.0.0'),
        ({"ipRanges": [{"range": "10.0.0.0/24", "range_start": 5}]},
         '"ipam.ipRanges[0].range_start": Expected'),
        ({"ipRanges": [{}]}, '"ipam.ipRanges[0]": "range" is missing'),
        ({"ipRanges": {}}, '"ipam.ipRanges"'),
        ({"range": 5}, '"ipam.range"'),
        ({"range": "10.0.0.5"}, '"ipam.range": invalid CIDR "10.0.0.5"'),
        ({"range": "192.168.1.5-192.168.2.25/28"},
         '"ipam.range": invalid range start for CIDR 192.168.2.16/28: 192.168.1.5'),
        ({"range": "10.0.0.9-10.0.0.5/24"}, '"ipam.range": range start 10.0.0.9 is after'),
        ({**R, "range_start": "10.0.1.1"}, '"ipam.range_start": invalid range start'),
        ({**R, "range_end": "10.0.1.1"}, '"ipam.range_end": invalid range end'),
        ({**R, "range_start": "10.0.0.9", "range_end": "10.0.0.5"}, '"ipam.range_start": range'),
        ({"range": "10.0.0.0/31"}, '"ipam.range": net mask is too short'),
        ({**R, "exclude": ["192.168.0.1/123"]},
         'could not parse exclude range "192.168.0.1/123" ("ipam.exclude[0]")'),
        ({**R, "exclude": ["10.0.0.1", "100::2::1"]}, '"ipam.exclude[1]"'),
        ({**R, "gateway": "10.0.0"}, '"ipam.gateway": invalid IP address'),
        ({**R, "gateway": "fd00::1"}, '"ipam.gateway" is an IPv6 address, but no range'),
        ({"ipRanges": [{**R, "gateway": "fd00::1"}]}, '"ipam.ipRanges[0].gateway" is an IPv6'),
        ({"range_start": "10.0.0.1"}, '"ipam.range_start" needs "ipam.range"'),
        ({"exclude": ["10.0.0.1"], "ipRanges": [R]}, '"ipam.exclude" needs "ipam.range"'),
        ({**R, "subnet": "10.0.0.0/24"}, '"ipam" has "range" and "subnet": remove one'),
        ({**R, "range_end": "10.0.0.5", "rangeEnd": "10.0.0.5"}, 'has "range_end" and "rangeEnd"'),
        ({"ranges": [[]]}, '"ipam.ranges[0]" is an empty range set'),
        ({"ranges": [[R, {"range": "fd00::/64"}]]}, "mixes IPv4 and IPv6 ranges"),
        ({"ranges": [[{"subnt": "10.0.0.0/24"}]]}, 'ipam.ranges[0][0]: unknown key "subnt"'),
        ({**R, "routes": [{"dst": "0.0.0.0/0"}, {"dest": "x"}]}, 'ipam.routes[1]: unknown'),
        ({**R, "routes": [{"dst": "nonsense"}]}, "ipam.routes[0]"),
        ({**R, "dns": {"nameserver": []}}, 'did you mean "nameservers"?'),
        ({**R, "probe": "once"}, '"ipam.probe"'),
        ({"addresses": [{"address": "10.0.0.1"}]}, '"ipam.addresses[0].address": invalid CIDR'),
        ({"addresses": [{"address": "10.0.0.1/24", "gateway": "fd00::1"}]}, "use one family"),
        ({"addresses": [{"address": "10.0.0.1/24", "gateway": "10.0.0.1"}]}, "are the same"),
        ({**R, "network_name": "a b"}, '"ipam.network_name"'),
        ({**R, "enable_overlapping_ranges": "yes"}, '"ipam.enable_overlapping_ranges"'),
        ({**R, "dns": {"domain": "x"}, "resolvConf": "/etc/resolv.conf"}, "remove one of them"),
        ({"type": "static"}, '"ipam.type" is "static": set "podfabric-ipam" or'),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_by_its_path(ipam: dict[str, Any], seen: str) -> None:
    with pytest.raises(CNIError) as caught:
        options(with_type(**ipam))
    assert seen in caught.value.message
    assert caught.value.code == Code.INVALID_CONFIG
    assert "\n" not in caught.value.message


def test_a_configuration_without_ipam_says_so() -> None:
    with pytest.raises(CNIError, match='"ipam" is missing: add it'):
        read(decode(b'{"name": "n1"}'))


@pytest.mark.parametrize("ipam", [[], "x", 5])
def test_ipam_that_is_no_object_is_named(ipam: object) -> None:
    with pytest.raises(CNIError, match='"ipam"'):
        options(ipam)


@pytest.mark.parametrize(
    ("ipam", "network", "first", "last", "gateway"),
    [
        ({"range": "192.168.1.5-192.168.1.25/24", "gateway": "192.168.10.1"},
         "192.168.1.0/24", "192.168.1.5", "192.168.1.25", "192.168.10.1"),
        ({"range": "00192.00168.1.5-000000192.168.1.25/24"},
         "192.168.1.0/24", "192.168.1.5", "192.168.1.25", None),
        ({"range": "00192.00168.1.0/24"}, "192.168.1.0/24", "192.168.1.1", "192.168.1.254", None),
        ({"range": "00192.00168.1.0/24", "range_start": "00192.00168.1.44"},
         "192.168.1.0/24", "192.168.1.44", "192.168.1.254", None),
        ({"range": "00192.00168.1.0/24", "range_start": "00192.00168.1.44",
          "range_end": "00192.00168.01.209"},
         "192.168.1.0/24", "192.168.1.44", "192.168.1.209", None),
        ({"range": "192.168.2.230/24", "range_start": "192.168.2.223"},
         "192.168.2.0/24", "192.168.2.223", "192.168.2.254", None),
        ({"range": "::ffff:10.0.0.0/120"}, "10.0.0.0/24", "10.0.0.1", "10.0.0.254", None),
        ({"subnet": "10.0.0.0/24", "rangeStart": "10.0.0.9", "rangeEnd": "10.0.0.20"},
         "10.0.0.0/24", "10.0.0.9", "10.0.0.20", "10.0.0.1"),
        ({"subnet": "10.0.0.0/31", "use_all_addresses": True},
         "10.0.0.0/31", "10.0.0.0", "10.0.0.1", None),
    ],
)  # fmt: skip
def test_a_range_is_read(
    ipam: dict[str, Any], network: str, first: str, last: str, gateway: str | None
) -> None:
    (only,) = options(with_type(**ipam)).sets
    (found,) = only.ranges
    assert str(found.network) == network
    assert (text(found.first), text(found.last)) == (first, last)
    assert (None if found.gateway is None else text(found.gateway)) == gateway


def test_a_range_of_its_own_gateway_prefers_it() -> None:
    ranges = [{"range": "10.1.0.0/24", "gateway": "10.1.0.254"}]
    read_options = options(with_type(range="10.0.0.0/24", gateway="10.0.0.1", ipRanges=ranges))
    gateways = [range_set.ranges[0].gateway for range_set in read_options.sets]
    assert [text(g) for g in gateways if g is not None] == ["10.0.0.1", "10.1.0.254"]


def test_options_of_other_storages_are_accepted_and_named() -> None:
    idle: dict[str, Any] = dict.fromkeys(WITHOUT_EFFECT, "x")
    read_options = options(with_type(**R, **idle))
    assert set(read_options.idle) == WITHOUT_EFFECT
    assert read_options.notes == ()


def test_whereabouts_own_sample_is_read() -> None:
    sample = {
        "type": "whereabouts",
        "datastore": "kubernetes",
        "kubernetes": {"kubeconfig": "/etc/cni/net.d/whereabouts.d/whereabouts.kubeconfig"},
        "range": "192.168.2.225/28",
        "exclude": ["192.168.2.229/30", "192.168.2.236/32"],
        "log_file": "/tmp/whereabouts.log",
        "log_level": "debug",
        "gateway": "192.168.2.1",
        "leader_lease_duration": 3000,
        "reconciler_cron_expression": "30 4 * * *",
    }
    assert len(options(sample).sets) == 1


def test_null_is_absent() -> None:
    assert len(options(with_type(**R, exclude=None, routes=None, gateway=None)).sets) == 1


def test_the_dash_form_wins_over_start_and_end_and_says_so() -> None:
    ipam = with_type(range="10.0.0.5-10.0.0.9/24", range_start="10.0.0.1")
    assert "ignored" in options(ipam).notes[0]


def test_the_runtimes_ranges_come_first() -> None:
    read_options = options(
        with_type(**R), runtimeConfig={"ipRanges": [[{"subnet": "10.7.0.0/24"}]]}
    )
    assert [str(range_set.ranges[0].network) for range_set in read_options.sets] == [
        "10.7.0.0/24",
        "10.0.0.0/24",
    ]


@pytest.mark.parametrize(
    ("shared", "domains"), [(True, ["blue"]), (False, ["blue 10.0.0.0/24", "blue fd00::/64"])]
)
def test_addresses_are_unique_by_network_name_or_by_range(shared: bool, domains: list[str]) -> None:
    read_options = options(
        with_type(
            **R,
            ipRanges=[{"range": "fd00::/64"}],
            network_name="blue",
            enable_overlapping_ranges=shared,
        )
    )
    assert sorted({range_set.ranges[0].domain for range_set in read_options.sets}) == domains


def test_a_resolv_conf_is_read(tmp_path: Path) -> None:
    file = tmp_path / "resolv.conf"
    file.write_text(
        "# a comment\nnameserver 10.0.0.1\n; another\nsearch a.example b.example\n"
        "domain example\noptions ndots:5\nnameserver fd00::1\n\nnonsense\n"
    )
    dns = read_resolv_conf(str(file), [str(tmp_path)])
    assert dns.nameservers == ("10.0.0.1", "fd00::1")
    assert (dns.domain, dns.search, dns.options) == (
        "example", ("a.example", "b.example"), ("ndots:5",),
    )  # fmt: skip
    with pytest.raises(CNIError, match=r'"ipam.resolvConf"'):
        read_resolv_conf(str(file.with_name("missing")), [str(tmp_path)])
