"""NETLINK_RDMA requests byte for byte, and its answers and refusals.

The bytes were worked out from rdma/rdma_netlink.h, for a little endian machine.
"""

import errno
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from host.errors import HostError
from host.namespaces import NetworkNamespace
from host.netlink import rdma
from host.netlink.rdma import NetlinkRdmaDevice, RdmaNetlink
from host.netlink.sockets import DUMPS
from tests.unit.host.kernel import Kernel, done, message, refusal

# Types of messages: RDMA_NL_NLDEV (5) << 10, and the command
GET, SET, NEWLINK, DELLINK, SYS_GET = 0x1401, 0x1402, 0x1403, 0x1404, 0x1406
MULTI = 0x2
MLX5 = NetlinkRdmaDevice(index=4, name="mlx5_3", node_guid="0011:2233:4455:6677", protocol="ib")
RXE = NetlinkRdmaDevice(index=9, name="rxe0", node_guid="0202:02ff:fe02:0202", protocol="roce")


class Subsystem(Kernel):
    """The other end of an RDMA socket."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        monkeypatch.setattr(rdma, "NETLINK_RDMA", 0)  # one that every kernel has
        self.socket = RdmaNetlink()
        self.stands_behind(self.socket, monkeypatch)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Subsystem:
    return Subsystem(monkeypatch)


@pytest.fixture
def pod() -> Iterator[NetworkNamespace]:
    with NetworkNamespace.open("/proc/self/ns/net") as namespace:
        yield namespace


def _attr(kind: int, payload: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(payload), kind) + payload + bytes(-len(payload) % 4)


def _told(device: NetlinkRdmaDevice, number: int = 1, flags: int = 0) -> bytes:
    """A device as fill_dev_info reports it, with attributes that are not read here."""
    guid = int(device.node_guid.replace(":", ""), 16)
    body = _attr(1, struct.pack("=I", device.index)) + _attr(2, device.name.encode() + b"\0")
    body += _attr(3, struct.pack("=I", 1)) + _attr(4, bytes(8)) + _attr(5, b"20.38.1002\0")
    body += _attr(6, struct.pack("=Q", guid)) + _attr(7, bytes(8)) + _attr(14, b"\1")
    if device.protocol:
        body += _attr(67, device.protocol.encode() + b"\0")
    return message(GET, body, number, flags)


def _mode(value: int, number: int = 1) -> bytes:
    return message(SYS_GET, _attr(66, bytes([value])) + _attr(92, b"\1"), number)


def _request(kind: str, flags: str, body: str, number: int = 1) -> bytes:
    payload = bytes.fromhex(body)
    header = struct.pack("=I", 16 + len(payload)) + bytes.fromhex(kind + flags)
    return header + struct.pack("=II", number, 0) + payload


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ECONNREFUSED])
def test_kernel_without_modes_is_an_error_with_a_remedy(kernel: Subsystem, code: int) -> None:
    kernel.answers(refusal(code))
    with pytest.raises(HostError, match=r"the kernel has no RDMA netlink.*ib_core"):
        rdma.mode(kernel.socket)


def test_answer_without_a_mode_is_an_error(kernel: Subsystem) -> None:
    kernel.answers(message(SYS_GET, _attr(92, b"\1")))
    with pytest.raises(HostError, match="is not a known mode"):
        rdma.mode(kernel.socket)


def test_kernel_without_rdma_is_an_error_with_a_remedy() -> None:
    if Path("/sys/module/ib_core").exists():
        pytest.skip("this kernel has RDMA")
    try:
        with rdma.rdma():
            pytest.skip("this kernel has RDMA")
    except HostError as error:
        assert "Protocol not supported (EPROTONOSUPPORT): the kernel has no RDMA" in str(error)


def test_device_that_another_hid_when_it_left_is_found_by_a_second_look(kernel: Subsystem) -> None:
    for number, seen in ((1, [MLX5]), (2, [RXE]), (3, [RXE])):
        kernel.answers(*(_told(device, number, MULTI) for device in seen), done(number))
    assert rdma.find(kernel.socket, "rxe0") == RXE


def test_devices_that_change_all_the_while_are_an_error(kernel: Subsystem) -> None:
    for number in range(1, DUMPS + 1):
        kernel.answers(_told((MLX5, RXE)[number % 2], number, MULTI), done(number))
    with pytest.raises(HostError, match=r"listing RDMA devices: .*the devices changed during each"):
        rdma.devices(kernel.socket)


def test_unknown_name_is_none(kernel: Subsystem) -> None:
    for number in (1, 2):
        kernel.answers(_told(MLX5, number, MULTI), done(number))
    assert rdma.find(kernel.socket, "mlx5_0") is None


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENODEV, errno.ENOENT])
def test_unknown_index_is_none(kernel: Subsystem, code: int) -> None:
    kernel.answers(refusal(code))
    assert rdma.by_index(kernel.socket, 4) is None


def test_device_that_may_not_be_looked_up_is_an_error(kernel: Subsystem) -> None:
    kernel.answers(refusal(errno.EPERM))
    with pytest.raises(HostError, match="looking up RDMA device 4: Operation not permitted"):
        rdma.by_index(kernel.socket, 4)


def test_move_names_the_device_by_index_and_the_namespace_by_descriptor(
    kernel: Subsystem, pod: NetworkNamespace
) -> None:
    kernel.answers(refusal(0))
    rdma.move(kernel.socket, MLX5, pod)
    descriptor = struct.pack("=I", pod.descriptor).hex()
    # SET, NLM_F_REQUEST | NLM_F_ACK; DEV_INDEX (1), u32; RDMA_NLDEV_NET_NS_FD (68), u32
    body = "0800 0100 04000000 0800 4400" + descriptor
    assert kernel.requests == [_request("0214", "0500", body)]


def test_move_out_of_a_pod_is_sent_from_inside_it(
    kernel: Subsystem, pod: NetworkNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel compares the device's namespace with the sender's, not with the socket's."""
    entered = []
    steps: list[int] = []
    monkeypatch.setattr("host.namespaces.setns", lambda fd, what: steps.append(fd))
    monkeypatch.setattr(kernel.socket, "namespace", pod)
    send = kernel.socket.send

    def sent(*requests: bytearray) -> None:
        entered.append(list(steps))
        send(*requests)

    monkeypatch.setattr(kernel.socket, "send", sent)
    kernel.answers(refusal(0))
    rdma.move(kernel.socket, MLX5, pod)
    assert entered == [[pod.descriptor]]
    assert len(steps) == 2  # and left again


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, "shared mode: run `rdma system set netns exclusive` .* `options ib_core netns_mode=0`"),
        (0, "its driver cannot detach running programs"),
    ],
)
def test_move_that_is_not_supported_says_whether_mode_or_driver(
    kernel: Subsystem, pod: NetworkNamespace, value: int, expected: str
) -> None:
    kernel.answers(refusal(errno.EOPNOTSUPP, 1))
    kernel.answers(_mode(value, 2))
    with pytest.raises(HostError, match=f'^moving RDMA device "mlx5_3" into netns .*{expected}'):
        rdma.move(kernel.socket, MLX5, pod)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENODEV])
def test_move_of_a_device_that_is_elsewhere_says_so(
    kernel: Subsystem, pod: NetworkNamespace, code: int
) -> None:
    kernel.answers(refusal(code))
    with pytest.raises(HostError, match="the device is no longer in the socket's namespace"):
        rdma.move(kernel.socket, MLX5, pod)


def test_rename_to_a_used_name_is_an_error(kernel: Subsystem) -> None:
    kernel.answers(refusal(errno.EEXIST))
    with pytest.raises(HostError, match='renaming RDMA device "mlx5_3" to "rxe0": File exists'):
        rdma.rename(kernel.socket, MLX5, "rxe0")
