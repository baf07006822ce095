"""A tenant cannot get an address that another tenant uses on the same link, nor learn its name.

The link of a foreign interface plugin is read from keys such as "master"; our own plugins pass it.
"""

import pytest

from cni.spec.errors import Code
from ipam.delegation import InProcess
from policy import rules
from tests.unit.ipam.calls import NEXT_BOOT, Calls, How, Json, error_of, request
from tests.unit.ipam.conftest import memory_path, node

__all__ = ["memory_path", "node"]

POOL = {"range": "10.0.0.0/24"}
EVIL = {**POOL, "network_name": "evil"}
ALONE = {**POOL, "enable_overlapping_ranges": False}
WIDER = {"range": "10.0.0.0/16", "enable_overlapping_ranges": False}
MASTER: Json = {"master": "eth0"}
VICTIM: How = {"network": "theirs", "pod": "victim", "config": MASTER}
TENANT: How = {"network": "mine", "pod": "tenant", "config": MASTER}


def allow(node: Calls) -> None:
    node.policy = rules.of({"set": {"private_ranges": [True]}}, "config.yaml")


# --- a private range over another network's addresses ------------------------------------------


@pytest.mark.parametrize(
    ("ipam", "key"),
    [
        (EVIL, '"ipam.network_name"'),
        ({**EVIL, "range_start": "10.0.0.1", "range_end": "10.0.0.1"}, '"ipam.network_name"'),
        (WIDER, '"ipam.enable_overlapping_ranges": false'),
        ({"addresses": [{"address": "10.0.0.1/24"}], "network_name": "evil"}, "network_name"),
    ],
)
def test_a_private_range_over_addresses_of_another_network_is_refused(
    node: Calls, ipam: Json, key: str
) -> None:
    node.add(POOL, "c1", **VICTIM)
    error = error_of(lambda: node.add(ipam, "c2", **TENANT))
    assert error.code == Code.NOT_ALLOWED
    assert key in error.message
    assert "set.private_ranges" in error.message
    assert "victim" not in error.message
    assert "theirs" not in error.message
    assert node.held() == {"10.0.0.1": "c1"}


def test_a_requested_address_does_not_hide_the_range(node: Calls) -> None:
    node.add(POOL, "c1", **VICTIM)
    config = {**MASTER, "runtimeConfig": {"ips": ["10.0.0.77"]}}
    error = error_of(lambda: node.add(EVIL, "c2", network="mine", config=config))
    assert error.code == Code.NOT_ALLOWED


def test_the_name_of_another_network_does_not_give_its_addresses(node: Calls) -> None:
    """A tenant also chooses the name of its network."""
    node.add(POOL, "c1", **VICTIM)
    assert node.addresses(EVIL, "c2", network="theirs", config=MASTER) == ["10.0.0.2/24"]


def test_private_ranges_that_the_policy_allows_give_out_no_address_twice(node: Calls) -> None:
    allow(node)
    node.add(POOL, "c1", **VICTIM)
    assert node.addresses(EVIL, "c2", **TENANT) == ["10.0.0.2/24"]
    assert node.addresses(WIDER, "c3", **TENANT) == ["10.0.0.3/16"]
    assert node.addresses(POOL, "c4", network="third", config=MASTER) == ["10.0.0.4/24"]


@pytest.mark.parametrize("ipam", [EVIL, ALONE])
def test_a_private_range_that_came_first_takes_nothing_from_a_later_shared_one(
    node: Calls, ipam: Json
) -> None:
    assert node.addresses(ipam, "c1", **TENANT) == ["10.0.0.1/24"]
    assert node.addresses(POOL, "c2", **VICTIM) == ["10.0.0.2/24"]
    assert node.addresses(POOL, "c3", network="theirs", config=MASTER) == ["10.0.0.3/24"]


@pytest.mark.parametrize(
    "how",
    [
        {"args": "IP=10.0.0.1"},
        {"config": {**MASTER, "runtimeConfig": {"ips": ["10.0.0.1"]}}},
        {"config": {**MASTER, "args": {"cni": {"ips": ["10.0.0.1/24"]}}}},
    ],
)
@pytest.mark.parametrize(("first", "second"), [(POOL, EVIL), (EVIL, POOL), (POOL, WIDER)])
def test_requested_address_of_another_domain_on_the_link_is_refused(
    node: Calls, how: How, first: Json, second: Json
) -> None:
    allow(node)
    node.add(first, "c1", **VICTIM)
    asked: How = {**TENANT, **how}
    error = error_of(lambda: node.add(second, "c2", **asked))
    assert error.code == Code.ADDRESS_TAKEN
    assert node.held() == {"10.0.0.1": "c1"}


def test_static_address_of_another_domain_on_the_link_is_refused(node: Calls) -> None:
    allow(node)
    node.add(POOL, "c1", **VICTIM)
    static = {"addresses": [{"address": "10.0.0.1/24"}], "network_name": "evil"}
    assert error_of(lambda: node.add(static, "c2", **TENANT)).code == Code.ADDRESS_TAKEN


def test_a_returning_pod_does_not_keep_an_address_that_another_domain_has_now(
    node: Calls,
) -> None:
    """Each pod has it on a different link, until one returns on the other's link."""
    elsewhere: How = {**TENANT, "config": {"master": "eth1"}}
    assert node.addresses(EVIL, "c1", **elsewhere) == ["10.0.0.1/24"]
    assert node.addresses(POOL, "c2", **VICTIM) == ["10.0.0.1/24"]
    allow(node)
    assert node.addresses(EVIL, "c3", **TENANT) == ["10.0.0.2/24"]


@pytest.mark.parametrize(
    ("first", "second"),
    [({"master": "eth0"}, {"master": "eth1"}), ({}, {}), ({"bridge": "a"}, {"bridge": "b"}),
     ({"type": "bridge", "bridge": "br0", "vlan": 7}, {"type": "bridge", "bridge": "br0"})],
)  # fmt: skip
def test_a_private_range_is_independent_on_other_and_on_unknown_links(
    node: Calls, first: Json, second: Json
) -> None:
    assert node.addresses(POOL, "c1", network="theirs", config=first) == ["10.0.0.1/24"]
    assert node.addresses(EVIL, "c2", network="mine", config=second) == ["10.0.0.1/24"]


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [
        ({"type": "macvlan", "master": "eth0"}, {"type": "macvlan", "Master": "eth0"}),
        # macvlan does not read "vlan": the link is the same.
        ({"type": "macvlan", "master": "eth0"}, {"type": "macvlan", "master": "eth0", "vlan": 7}),
        ({"type": "bridge"}, {"type": "bridge", "bridge": "cni0", "master": "eth0"}),
        ({"type": "vlan", "master": "eth0", "vlanId": 7},
         {"type": "vlan", "master": "eth0", "vlanId": 7, "vlan": 8}),
    ],
)  # fmt: skip
def test_keys_that_the_plugin_does_not_read_do_not_change_the_link(
    node: Calls, theirs: Json, mine: Json
) -> None:
    node.add(POOL, "c1", network="theirs", config=theirs)
    error = error_of(lambda: node.add(EVIL, "c2", network="mine", config=mine))
    assert error.code == Code.NOT_ALLOWED


def test_the_link_that_our_own_plugins_pass_overrides_the_configuration(node: Calls) -> None:
    first = InProcess(request("ADD", POOL, "c1", config=MASTER), node.plugin)
    first.add("ib0 0x8001")
    asked = request("ADD", EVIL, "c2", network="mine", config={"master": "ib1"})
    second = InProcess(asked, node.plugin)
    assert error_of(lambda: second.add("ib0 0x8001")).code == Code.NOT_ALLOWED
    assert [ip.address for ip in second.add("ib0 0x8002").ips] == ["10.0.0.1/24"]
    segments = {
        reservation.container_id: reservation.segment for reservation in node.store.reservations()
    }
    assert segments == {"c1": "ib0 0x8001", "c2": "ib0 0x8002"}


def test_a_network_is_not_refused_because_of_its_own_earlier_addresses(node: Calls) -> None:
    """Its administrator has made the network private since; its earlier pods still run."""
    node.add(POOL, "c1", **VICTIM)
    assert node.addresses(EVIL, "c2", **VICTIM) == ["10.0.0.2/24"]


def test_addresses_of_an_earlier_boot_in_another_domain_are_used_last(node: Calls) -> None:
    tiny = {"range": "10.0.0.0/30"}
    node.add(tiny, "c1", **VICTIM)
    node.boot = NEXT_BOOT
    allow(node)
    evil = {**tiny, "network_name": "evil"}
    assert node.addresses(evil, "c2", **TENANT) == ["10.0.0.2/30"]
    assert node.addresses(evil, "c3", network="mine", config=MASTER) == ["10.0.0.1/30"]
    # The pod returns: no address is left, and no address is given twice.
    error = error_of(lambda: node.add(tiny, "c4", **VICTIM))
    assert error.code == Code.NO_FREE_ADDRESS


# --- errors do not name another tenant ---------------------------------------------------------


@pytest.mark.parametrize("second", [POOL, {"addresses": [{"address": "10.0.0.1/24"}]}])
def test_an_error_names_no_pod_of_another_tenant_and_the_log_does(
    node: Calls, second: Json, capfd: pytest.CaptureFixture[str]
) -> None:
    node.add(POOL, "secret-container", network="theirs", pod="secret-pod")
    how: How = {"network": "mine", "args": "IP=10.0.0.1" if second is POOL else ""}
    error = error_of(lambda: node.add(second, "c2", **how))
    assert error.code == Code.ADDRESS_TAKEN
    text = f"{error.message} {error.details}"
    assert "in use by another attachment" in text
    assert not any(word in text for word in ("secret", "theirs", "ns/"))
    log = capfd.readouterr().err
    assert "10.0.0.1 is held by pod ns/secret-pod, theirs/secret-container/eth0" in log


def test_a_full_range_names_no_pod(node: Calls) -> None:
    tiny = {"range": "10.0.0.0/30"}
    for name in ("secret-1", "secret-2"):
        node.add(tiny, name, network="theirs", pod=name)
    error = error_of(lambda: node.add(tiny, "c3", network="mine"))
    assert error.code == Code.NO_FREE_ADDRESS
    assert "secret" not in error.message
    assert "theirs" not in error.message


# --- how many ----------------------------------------------------------------------------------


def many(count: int) -> list[str]:
    return [f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}/8" for n in range(1, count + 1)]


def test_the_limit_counts_all_of_them_together(node: Calls) -> None:
    static = [{"address": f"10.0.1.{n}/24"} for n in range(1, 41)]
    ranges = [{"range": f"10.1.{n}.0/24"} for n in range(24)]
    assert len(node.addresses({"ipRanges": ranges, "addresses": static})) == 64
    ranges.append({"range": "10.2.0.0/24"})
    error = error_of(lambda: node.add({"ipRanges": ranges, "addresses": static}, "c2"))
    assert (error.code, "65" in error.message) == (Code.INVALID_CONFIG, True)


def test_addresses_that_are_listed_twice_count_once(node: Calls) -> None:
    """Multus writes one request into two keys."""
    addresses = [f"10.0.0.{n}/24" for n in range(1, 65)]
    config = {"runtimeConfig": {"ips": addresses}, "args": {"cni": {"ips": addresses}}}
    assert node.addresses({}, config=config) == addresses
