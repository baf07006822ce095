"""Requests for a VF byte for byte, and the kernel's reports of VFs, also of old kernels.

The bytes were worked out from linux/if_link.h, for a little endian machine of 64 bits.
"""

import errno
import re
import struct
from collections.abc import Callable

import msgspec
import pytest
from pyroute2.netlink.rtnl.ifinfmsg import IFF_LOWER_UP, IFF_RUNNING, IFF_UP

from host.errors import HostError
from host.netlink import vfs
from host.netlink.sockets import BUFFER, Rtnetlink
from host.netlink.vfs import VF
from tests.unit.clock import Clock
from tests.unit.host.kernel import (
    IB_PF,
    IFINFOMSG,
    PF,
    Kernel,
    old_vf_info,
    refusal,
    vf_info,
    vfs_answer,
)

LINKED = msgspec.structs.replace(PF, flags=IFF_UP | IFF_LOWER_UP | IFF_RUNNING)
NODE, PORT = "00:11:22:33:44:55:66:77", "00:11:22:33:44:55:66:78"


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


Setting = Callable[[Rtnetlink], None]
SETTINGS: dict[str, tuple[Setting, str]] = {
    "node GUID": (
        lambda route: vfs.set_guids(route, IB_PF, 3, NODE, None),
        "1c00 1600"  # IFLA_VFINFO_LIST, 28 bytes
        "1800 0100"  # IFLA_VF_INFO, 24 bytes
        "1400 0a00"  # IFLA_VF_IB_NODE_GUID (10), 20 bytes: struct ifla_vf_guid
        "03000000 00000000"  # vf, what the compiler adds
        "7766554433221100",  # guid, in host order
    ),
    "port GUID": (
        lambda route: vfs.set_guids(route, IB_PF, 3, None, PORT),
        "1c00 1600 1800 0100"  # as above
        "1400 0b00"  # IFLA_VF_IB_PORT_GUID (11), 20 bytes
        "03000000 00000000 7866554433221100",  # vf, gap, guid
    ),
}


@pytest.mark.parametrize(("setting", "expected"), SETTINGS.values(), ids=SETTINGS.keys())
def test_setting_is_one_request_with_the_bytes_of_the_headers(
    kernel: Kernel, setting: Setting, expected: str
) -> None:
    kernel.answers(refusal(0))
    setting(kernel.route)
    body = bytes.fromhex(IFINFOMSG + expected)
    # struct nlmsghdr: length, RTM_SETLINK (19), NLM_F_REQUEST | NLM_F_ACK, sequence, port
    header = (16 + len(body)).to_bytes(4, "little") + bytes.fromhex("1300 0500 01000000 00000000")
    assert kernel.requests == [header + body]


def test_vlan_that_goes_neither_way_is_an_error_that_names_the_vf(kernel: Kernel) -> None:
    kernel.answers(refusal(errno.EOPNOTSUPP, 1))
    kernel.answers(refusal(errno.EOPNOTSUPP, 2))
    expected = r'^setting vlan 100 of VF 3 of "ens1f0": Operation not supported \(E\w+\): the PF'
    with pytest.raises(HostError, match=expected):
        vfs.set_vlan(kernel.route, PF, 3, 100, 0, "802.1q")


def test_vlan_that_is_refused_for_another_reason_is_not_tried_again(kernel: Kernel) -> None:
    kernel.answers(refusal(errno.EINVAL, words=b"Reserved for the PF\0"))
    with pytest.raises(HostError) as caught:
        vfs.set_vlan(kernel.route, PF, 3, 100, 0, "802.1q")
    expected = 'setting vlan 100 of VF 3 of "ens1f0": Invalid argument (EINVAL): Reserved for the P'
    assert str(caught.value) == expected + "F"


def test_driver_without_8021ad_is_named_and_the_old_way_is_not_tried(kernel: Kernel) -> None:
    kernel.answers(refusal(errno.EPROTONOSUPPORT))
    with pytest.raises(HostError, match=r"the PF's driver has no 802\.1ad, only 802\.1q"):
        vfs.set_vlan(kernel.route, PF, 3, 100, 0, "802.1ad")
    assert len(kernel.requests) == 1


@pytest.mark.parametrize("code", [errno.EBUSY, errno.EAGAIN])
def test_pf_that_is_busy_is_asked_again(kernel: Kernel, clock: Clock, code: int) -> None:
    for number in (1, 2):
        kernel.answers(refusal(code, number))
    kernel.answers(refusal(0, 3))
    vfs.set_trust(kernel.route, PF, 3, True)
    assert clock.pauses == [vfs.PAUSE] * 2
    assert kernel.requests[0][16:] == kernel.requests[2][16:]


def test_pf_that_stays_busy_is_an_error_with_the_kernels_reason(
    kernel: Kernel, clock: Clock
) -> None:
    for number in range(1, 40):
        kernel.answers(refusal(errno.EBUSY, number, b"VF is in reset\0"))
    with pytest.raises(HostError) as caught:
        vfs.set_trust(kernel.route, PF, 3, True)
    expected = 'setting trust on of VF 3 of "ens1f0": Device or resource busy (EBUSY): VF is in res'
    assert str(caught.value) == expected + "et"
    assert sum(clock.pauses) == pytest.approx(vfs.BUSY_TIME)


@pytest.mark.parametrize(
    ("setting", "code", "remedy"),
    [
        (lambda r: vfs.set_rate(r, LINKED, 3, 1, 0), errno.EINVAL, "have no min_tx_rate"),
        (lambda r: vfs.set_rate(r, PF, 3, 0, 9), errno.EOPNOTSUPP, "cannot set this rate"),
        (lambda r: vfs.set_spoofchk(r, PF, 3, True), errno.EOPNOTSUPP, "has no spoofchk"),
        (lambda r: vfs.set_trust(r, PF, 3, True), errno.EOPNOTSUPP, "not support trusted VFs"),
        (lambda r: vfs.set_link_state(r, PF, 3, "auto"), errno.EOPNOTSUPP, 'link to "auto"'),
        (
            lambda r: vfs.set_guids(r, PF, 3, NODE, PORT),
            errno.EOPNOTSUPP,
            "only InfiniBand has GUIDs",
        ),
    ],
)
def test_unsupported_setting_is_an_error_with_a_remedy(
    kernel: Kernel, setting: Setting, code: int, remedy: str
) -> None:
    kernel.answers(refusal(code))
    with pytest.raises(HostError, match=remedy):
        setting(kernel.route)


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        (0, '"ens1f0" is down: run `ip link set ens1f0 up`'),
        (IFF_UP, '"ens1f0" has no carrier: check its cable'),
        (IFF_UP | IFF_LOWER_UP | IFF_RUNNING, "the PF's driver cannot set this rate"),
    ],
)
def test_rate_that_a_pf_without_a_link_refuses_is_told_so(
    kernel: Kernel, flags: int, remedy: str
) -> None:
    """igb_ndo_set_vf_bw: EINVAL unless the link is up and as fast as the rate."""
    kernel.answers(refusal(errno.EINVAL))
    with pytest.raises(HostError, match=re.escape(remedy)):
        vfs.set_rate(kernel.route, msgspec.structs.replace(PF, flags=flags), 3, 0, 100)


MACS = [bytes.fromhex("02112233aabb"), bytes.fromhex("02112233aabc")]
FIRST = VF(
    index=0,
    mac="02:11:22:33:aa:bb",
    vlan=100,
    qos=5,
    proto="802.1ad",
    min_tx_rate=50,
    max_tx_rate=1000,
    spoofchk=True,
    trust=True,
    link_state="enable",
    node_guid=NODE,
    port_guid=PORT,
)
SECOND = VF(
    index=1,
    mac="02:11:22:33:aa:bc",
    vlan=100,
    qos=5,
    proto="802.1ad",
    min_tx_rate=50,
    max_tx_rate=1000,
    spoofchk=None,
    trust=None,
    link_state="disable",
    node_guid=None,
    port_guid=None,
)


def test_unreported_settings_of_a_vf_are_none(
    kernel: Kernel,
) -> None:
    told = vf_info(0, MACS[0], guid=0x0011223344556677)
    silent = vf_info(1, MACS[1], setting=0xFFFFFFFF, state=2)
    for number in (1, 2):
        kernel.answers(vfs_answer(told, silent, number=number))
    assert vfs.read(kernel.route, PF, 0) == FIRST
    assert vfs.read(kernel.route, PF, 1) == SECOND


def test_vf_of_an_old_kernel_is_read(kernel: Kernel) -> None:
    kernel.answers(vfs_answer(old_vf_info(0, MACS[0])))
    assert vfs.read(kernel.route, PF, 0) == VF(
        index=0,
        mac="02:11:22:33:aa:bb",
        vlan=20,
        qos=1,
        proto="802.1q",
        min_tx_rate=0,
        max_tx_rate=500,
        spoofchk=None,
        trust=None,
        link_state=None,
        node_guid=None,
        port_guid=None,
    )


def test_infinibands_address_of_20_bytes_is_read_whole(kernel: Kernel) -> None:
    kernel.answers(vfs_answer(vf_info(0, bytes(range(20)))))
    assert vfs.read(kernel.route, IB_PF, 0).mac == bytes(range(20)).hex(":")


def test_missing_vf_is_an_error_that_names_it(kernel: Kernel) -> None:
    kernel.answers(vfs_answer(vf_info(0, MACS[0])))
    with pytest.raises(HostError, match=r'^"ens1f0" has no VF 1$'):
        vfs.read(kernel.route, PF, 1)


def test_unreported_vf_does_not_hide_others(kernel: Kernel) -> None:
    answer = bytearray(vfs_answer(vf_info(0, MACS[0]), vf_info(2, MACS[1])))
    at = answer.index(struct.pack("=HHI", 8, 21, 2))  # IFLA_NUM_VF
    answer[at + 4] = 3
    kernel.answers(bytes(answer))
    assert vfs.read(kernel.route, PF, 2).index == 2


def test_list_that_is_longer_than_its_length_can_say_is_read_whole(kernel: Kernel) -> None:
    infos = [old_vf_info(index, MACS[0]) for index in range(900)]
    for number, index in enumerate((0, 899), start=1):
        answer = vfs_answer(*infos, number=number)
        assert 0x10000 < len(answer) < BUFFER
        kernel.answers(answer)
        assert vfs.read(kernel.route, PF, index).index == index


def test_pf_that_is_gone_is_an_error_that_names_it(kernel: Kernel) -> None:
    kernel.answers(refusal(errno.ENODEV))
    with pytest.raises(HostError, match='reading the VFs of "ens1f0": No such device'):
        vfs.read(kernel.route, PF, 0)
