"""From an option to the request for the PF's driver, and to the one that restores it.

The bytes were worked out from linux/if_link.h, for a little endian machine of 64 bits.
tests/unit/host/test_vfs.py has the bytes before these, and each GUID alone.
"""

import errno
import struct
from typing import Any

import msgspec
import pytest

from cni.sriov import vf_settings
from host.errors import HostError
from host.netlink import vfs
from host.netlink.vfs import VF
from tests.unit.clock import Clock
from tests.unit.host.kernel import IB_PF, IFINFOMSG, PF, Kernel, refusal, vf_info, vfs_answer
from tests.unit.sriov.configuration import read
from tests.unit.sriov.node import vf

GUID, OTHER_GUID = "02:00:00:00:00:00:00:ab", "11:22:33:00:00:aa:bb:cc"
MAC, OLD_MAC = "e4:11:22:33:44:55", "02:11:22:33:aa:bb"
NAMES = {1: "mac", 2: "old vlan", 12: "vlan", 6: "rate", 4: "spoofchk", 9: "trust"}
NAMES |= {5: "link_state", 10: "guids"}
BEFORE = vf(3)
ALL: dict[str, Any] = {
    "mac": MAC,
    "vlan": 100,
    "min_tx_rate": 1000,
    "max_tx_rate": 4000,
    "spoofchk": "off",
    "trust": "on",
    "link_state": "enable",
}

# struct ifla_vf_*: VF 3 first
VLAN = "2000 1600 1c00 0100 1800 0c00 1400 0100 03000000 "
RATE = "1800 1600 1400 0100 1000 0600 03000000 "
SPOOFCHK = "1400 1600 1000 0100 0c00 0400 03000000 "
TRUST = "1400 1600 1000 0100 0c00 0900 03000000 "
LINK_STATE = "1400 1600 1000 0100 0c00 0500 03000000 "
NODE, PORT = (f"1800 0100 1400 {kind}00 03000000 00000000 " for kind in ("0a", "0b"))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


def _acknowledged(kernel: Kernel, times: int = 9) -> None:
    for number in range(len(kernel.requests) + 1, len(kernel.requests) + 1 + times):
        kernel.answers(refusal(0, number))


def _wanted(before: VF, **config: Any) -> VF:  # noqa: ANN401
    return vf_settings.wanted(before, read(**config))


def _written(kernel: Kernel, now: VF, target: VF) -> list[str]:
    """The settings in the requests, by the attribute in the first IFLA_VF_INFO of each."""
    _acknowledged(kernel)
    before = len(kernel.requests)
    vf_settings.apply(kernel.route, PF, now, target)
    bodies = [request[16 + 16 + 4 + 4 :] for request in kernel.requests[before:]]
    return [NAMES[struct.unpack_from("=HH", body)[1]] for body in bodies]


@pytest.mark.parametrize(
    ("before", "config", "applied", "taken_back"),
    [
        pytest.param(
            BEFORE,
            {"link_state": "enable"},
            LINK_STATE + "01000000",
            LINK_STATE + "00000000",
            id="link_state",
        ),
        pytest.param(
            vf(3, link_state="disable"),
            {"link_state": "auto"},
            LINK_STATE + "00000000",
            LINK_STATE + "02000000",
            id="link_state-that-was-not-auto",
        ),
        pytest.param(
            BEFORE,
            {"min_tx_rate": 1000, "max_tx_rate": 4000},
            RATE + "e8030000 a00f0000",
            RATE + "00000000 00000000",
            id="both-rates",
        ),
        pytest.param(
            vf(3, min_tx_rate=100, max_tx_rate=200),
            {"max_tx_rate": 4000},
            RATE + "00000000 a00f0000",
            RATE + "64000000 c8000000",
            id="one-rate-means-none-of-the-other",
        ),
        pytest.param(
            vf(3, min_tx_rate=0, max_tx_rate=200),
            {"min_tx_rate": 50},
            RATE + "32000000 00000000",
            RATE + "00000000 c8000000",
            id="min-rate-alone",
        ),
        pytest.param(
            BEFORE,
            {"guid": GUID},
            "3400 1600" + NODE + "ab00000000000002" + PORT + "ab00000000000002",
            "3400 1600" + NODE + "ffffffffffffffff" + PORT + "ffffffffffffffff",
            id="guid-where-there-was-none-goes-back-to-all-FF",
        ),
        pytest.param(
            vf(3, node_guid=OTHER_GUID, port_guid=OTHER_GUID),
            {"guid": GUID},
            "3400 1600" + NODE + "ab00000000000002" + PORT + "ab00000000000002",
            "3400 1600" + NODE + "ccbbaa0000332211" + PORT + "ccbbaa0000332211",
            id="guid",
        ),
        pytest.param(
            BEFORE,
            {"vlan": 100, "vlanQoS": 5, "vlanProto": "802.1AD"},
            VLAN + "64000000 05000000 88a8 0000",
            VLAN + "00000000 00000000 8100 0000",
            id="vlan",
        ),
        pytest.param(
            vf(3, vlan=1, qos=1),
            {"vlan": 0},
            VLAN + "00000000 00000000 8100 0000",
            VLAN + "01000000 01000000 8100 0000",
            id="vlan-0-takes-the-tag-off",
        ),
        pytest.param(
            BEFORE,
            {"spoofchk": "off"},
            SPOOFCHK + "00000000",
            SPOOFCHK + "01000000",
            id="spoofchk",
        ),
        pytest.param(BEFORE, {"trust": "on"}, TRUST + "01000000", TRUST + "00000000", id="trust"),
        pytest.param(
            vf(3, trust=None),
            {"trust": "on"},
            TRUST + "01000000",
            TRUST + "00000000",
            id="trust-that-is-not-reported",
        ),
    ],
)
def test_option_is_one_request_and_one_to_restore_it(
    kernel: Kernel, before: VF, config: dict[str, Any], applied: str, taken_back: str
) -> None:
    _acknowledged(kernel, 2)
    after = _wanted(before, **config)
    vf_settings.apply(kernel.route, PF, before, after)
    vf_settings.apply(kernel.route, PF, after, vf_settings.restored(after, before, after))
    expected = [bytes.fromhex(IFINFOMSG + body) for body in (applied, taken_back)]
    assert [request[16:] for request in kernel.requests] == expected


def test_address_is_set_read_back_and_set_again_to_the_old_one(kernel: Kernel) -> None:
    address = bytes.fromhex(MAC.replace(":", ""))
    old = bytes.fromhex(OLD_MAC.replace(":", ""))
    for number, shown in ((1, address), (3, old)):
        kernel.answers(refusal(0, number))
        kernel.answers(vfs_answer(vf_info(3, shown), number=number + 1))
    after = _wanted(BEFORE, mac=MAC)
    vf_settings.apply(kernel.route, PF, BEFORE, after)
    vf_settings.apply(kernel.route, PF, after, vf_settings.restored(after, BEFORE, after))
    sets = [kernel.requests[at][16:] for at in (0, 2)]
    body = IFINFOMSG + "3000 1600 2c00 0100 2800 0100 03000000"  # struct ifla_vf_mac
    assert sets == [
        bytes.fromhex(body) + address_bytes.ljust(32, b"\0") for address_bytes in (address, old)
    ]


def test_address_that_comes_late_is_waited_for(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    kernel.answers(refusal(0, 1))
    for number, shown in ((2, bytes(6)), (3, bytes.fromhex("e41122334455"))):
        kernel.answers(vfs_answer(vf_info(3, shown), number=number))
    vf_settings.apply(kernel.route, PF, BEFORE, _wanted(BEFORE, mac=MAC))
    assert clock.pauses == [vf_settings.PAUSE]


def test_address_that_never_comes_is_an_error_that_names_both(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:  # SU9
    Clock(monkeypatch)
    kernel.answers(refusal(0, 1))
    for number in range(2, 40):
        kernel.answers(vfs_answer(vf_info(3, bytes(6)), number=number))
    with pytest.raises(HostError) as caught:
        vf_settings.apply(kernel.route, PF, BEFORE, _wanted(BEFORE, mac=MAC))
    assert str(caught.value) == (
        f'the PF "ens1f0" still shows MAC address 00:00:00:00:00:00 for VF 3, although '
        f"{MAC} was set: see dmesg for errors of the PF's driver"
    )


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EPROTONOSUPPORT])
def test_driver_without_vlan_lists_is_set_and_restored_the_old_way(
    kernel: Kernel, code: int
) -> None:
    for number in (1, 3):
        kernel.answers(refusal(code, number))
        kernel.answers(refusal(0, number + 1))
    after = _wanted(BEFORE, vlan=100, vlanQoS=5)
    vf_settings.apply(kernel.route, PF, BEFORE, after)
    vf_settings.apply(kernel.route, PF, after, vf_settings.restored(after, BEFORE, after))
    old = "1800 1600 1400 0100 1000 0200 03000000"  # struct ifla_vf_vlan
    sets = [kernel.requests[at][16:] for at in (1, 3)]
    assert sets == [
        bytes.fromhex(IFINFOMSG + old + "64000000 05000000"),
        bytes.fromhex(IFINFOMSG + old + "00000000 00000000"),
    ]


def test_empty_configuration_sends_nothing(kernel: Kernel) -> None:  # SM9, SM16
    assert _wanted(BEFORE) == BEFORE
    assert _written(kernel, BEFORE, BEFORE) == []
    assert _written(kernel, BEFORE, vf_settings.restored(BEFORE, BEFORE, BEFORE)) == []


def test_equal_setting_is_not_sent(kernel: Kernel) -> None:
    now = vf(3, vlan=100, trust=True, node_guid=GUID, port_guid=GUID)
    wanted = _wanted(now, vlan=100, trust=True, spoofchk="off")
    assert _written(kernel, now, wanted) == ["spoofchk"]


def test_order_is_address_vlan_rates_then_the_rest(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:  # SM10
    after = _wanted(BEFORE, **ALL)
    monkeypatch.setattr(vfs, "read", lambda route, pf, index: after)
    order = ["mac", "vlan", "rate", "spoofchk", "trust", "link_state"]
    assert _written(kernel, BEFORE, after) == order
    assert after == vf(
        3,
        mac=MAC,
        vlan=100,
        min_tx_rate=1000,
        max_tx_rate=4000,
        spoofchk=False,
        trust=True,
        link_state="enable",
    )


def test_everything_is_restored_in_the_same_order(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:  # SM18
    before = vf(3, vlan=1, qos=1, link_state="disable")
    applied = _wanted(before, **ALL)
    monkeypatch.setattr(vfs, "read", lambda route, pf, index: before)
    target = vf_settings.restored(applied, before, applied)
    assert target == before
    order = ["mac", "vlan", "rate", "spoofchk", "trust", "link_state"]
    assert _written(kernel, applied, target) == order


def test_administrators_change_of_another_setting_stays() -> None:
    applied = _wanted(BEFORE, vlan=100)
    now = msgspec.structs.replace(applied, max_tx_rate=77, trust=True, link_state="enable")
    target = vf_settings.restored(now, BEFORE, applied)
    assert target == vf(3, max_tx_rate=77, trust=True, link_state="enable")


def test_address_is_restored_though_it_was_not_applied(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:  # SM17: a VF's driver may change it, too
    now = vf(3, mac=MAC)
    target = vf_settings.restored(now, BEFORE, BEFORE)
    assert target.mac == OLD_MAC
    monkeypatch.setattr(vfs, "read", lambda route, pf, index: BEFORE)
    assert _written(kernel, now, target) == ["mac"]


def test_address_of_infiniband_is_never_set(kernel: Kernel) -> None:  # hole F
    mac = bytes(range(20)).hex(":")
    before, now = vf(3, mac=mac), vf(3, mac=bytes(range(1, 21)).hex(":"))
    _acknowledged(kernel)
    vf_settings.apply(kernel.route, IB_PF, now, vf_settings.restored(now, before, before))
    assert kernel.requests == []


def test_part_of_a_tag_or_of_the_rates_takes_the_whole_back() -> None:
    before = vf(3, vlan=7, qos=1, min_tx_rate=5, max_tx_rate=50)
    applied = _wanted(before, vlan=7, vlanQoS=2, min_tx_rate=5, max_tx_rate=60)
    now = msgspec.structs.replace(applied, vlan=9, min_tx_rate=6)
    assert vf_settings.restored(now, before, applied) == before


def test_guid_that_was_all_zero_goes_back_to_all_ff() -> None:  # B11
    before = vf(3)  # as the kernel's zeros are read
    applied = _wanted(before, guid=GUID)
    target = vf_settings.restored(applied, before, applied)
    assert (target.node_guid, target.port_guid) == (vf_settings.NO_GUID, vf_settings.NO_GUID)


@pytest.mark.parametrize("name", ["spoofchk", "trust", "link_state"])
def test_unreported_setting_is_restored_to_a_new_vfs_value(kernel: Kernel, name: str) -> None:
    now, target = BEFORE, msgspec.structs.replace(BEFORE, **{name: None})
    assert _written(kernel, now, target) == []
