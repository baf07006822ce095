"""One result in every version: the output of the reference's own types, compacted."""

from typing import Any

FAMILY_020 = ("0.1.0", "0.2.0")
FAMILY_040 = ("0.3.0", "0.3.1", "0.4.0")
FAMILY_100 = ("1.0.0", "1.1.0")

DNS_VECTOR = {"nameservers": ["10.1.2.1"], "domain": "d", "search": ["s"], "options": ["o"]}

INPUT: dict[str, Any] = {
    "cniVersion": "1.1.0",
    "interfaces": [
        {
            "name": "net1",
            "mac": "02:00:00:00:00:01",
            "mtu": 1500,
            "sandbox": "/var/run/netns/T",
            "socketPath": "/run/s",
            "pciID": "0000:03:00.2",
        }
    ],
    "ips": [
        {"interface": 0, "address": "10.1.2.3/24", "gateway": "10.1.2.1"},
        {"interface": 0, "address": "10.1.3.3/24"},
        {"address": "fd00::3/64", "gateway": "fd00::1"},
    ],
    "routes": [
        {"dst": "0.0.0.0/0"},
        {
            "dst": "192.168.0.0/16",
            "gw": "10.1.2.9",
            "mtu": 1400,
            "advmss": 1360,
            "priority": 0,
            "table": 0,
            "scope": 253,
        },
        {"dst": "fd01::/64", "gw": "fd00::9"},
    ],
    "dns": DNS_VECTOR,
}

GOLDEN_020: dict[str, Any] = {
    "ip4": {
        "ip": "10.1.2.3/24",
        "gateway": "10.1.2.1",
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "192.168.0.0/16", "gw": "10.1.2.9"}],
    },
    "ip6": {
        "ip": "fd00::3/64",
        "gateway": "fd00::1",
        "routes": [{"dst": "fd01::/64", "gw": "fd00::9"}],
    },
    "dns": DNS_VECTOR,
}

GOLDEN_ROUTES = [
    {"dst": "0.0.0.0/0"},
    {
        "dst": "192.168.0.0/16",
        "gw": "10.1.2.9",
        "mtu": 1400,
        "advmss": 1360,
        "table": 0,
        "scope": 253,
    },
    {"dst": "fd01::/64", "gw": "fd00::9"},
]

GOLDEN_040: dict[str, Any] = {
    "interfaces": [
        {"name": "net1", "mac": "02:00:00:00:00:01", "sandbox": "/var/run/netns/T"},
    ],
    "ips": [
        {"version": "4", "interface": 0, "address": "10.1.2.3/24", "gateway": "10.1.2.1"},
        {"version": "4", "interface": 0, "address": "10.1.3.3/24"},
        {"version": "6", "address": "fd00::3/64", "gateway": "fd00::1"},
    ],
    "routes": GOLDEN_ROUTES,
    "dns": DNS_VECTOR,
}

GOLDEN_100: dict[str, Any] = {**INPUT, "routes": GOLDEN_ROUTES}

GOLDEN = (
    [("", {"cniVersion": "0.1.0", **GOLDEN_020})]
    + [(version, {**GOLDEN_020, "cniVersion": version}) for version in FAMILY_020]
    + [(version, {**GOLDEN_040, "cniVersion": version}) for version in FAMILY_040]
    + [(version, {**GOLDEN_100, "cniVersion": version}) for version in FAMILY_100]
)
