"""Netlink requests byte for byte, and every form of answer."""

import errno
import socket
import struct
import threading

import pytest
from pyroute2.netlink.rtnl import RTM_GETLINK, RTM_NEWLINK

from host.errors import HostError
from host.netlink import links, sockets
from host.netlink.messages import LinkMessage
from host.netlink.messages import message as made
from host.netlink.sockets import ChangeRequest, NetlinkError, Rtnetlink
from tests.unit.host.kernel import MULTI, Kernel, done, message, refusal

ADDRESS = bytes(range(20))
INTERRUPTED = 0x10


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


def _link_message(address: bytes, number: int = 1, flags: int = 0) -> bytes:
    body = struct.pack("=BxHiII", 0, links.ARPHRD_INFINIBAND, 5, 0, 0)
    body += struct.pack("=HH4s", 8, 3, b"ib0\0")  # IFLA_IFNAME
    body += struct.pack("=HHQ", 12, 23, 1)  # one that is not read here
    body += struct.pack("=HH", 4 + len(address), 1) + address  # IFLA_ADDRESS
    return message(RTM_NEWLINK, body, number, flags)


def _question() -> LinkMessage:
    return made(LinkMessage, index=5)


def _change(what: str, *accepted: int) -> ChangeRequest:
    return ChangeRequest(what, RTM_NEWLINK, _question(), accepted=accepted)


def test_refusal_names_the_change_and_the_kernels_answer(kernel: Kernel) -> None:
    kernel.answers(refusal(errno.EEXIST, words=b"An interface has it.\0"))
    with pytest.raises(HostError) as caught:
        kernel.route.change(_change("moving it"))
    assert str(caught.value) == "moving it: File exists (EEXIST): An interface has it"


def test_refusal_of_an_earlier_change_is_raised_after_later_changes(
    kernel: Kernel,
) -> None:
    """Only the last is acknowledged, and its answer comes after every refusal."""
    kernel.answers(refusal(errno.EEXIST, 1), refusal(errno.EINVAL, 2), refusal(0, 4))
    changes = [
        _change("first", errno.EEXIST),
        _change("second"),
        _change("third"),
        _change("fourth"),
    ]
    with pytest.raises(HostError, match=r"^second: Invalid argument"):
        kernel.route.change(*changes)
    (sent,) = kernel.requests
    flags, numbers = [], []
    while sent:
        length, _, flag, number = struct.unpack_from("=IHHI", sent)
        flags.append(flag)
        numbers.append(number)
        sent = sent[length:]
    assert numbers == [1, 2, 3, 4]
    assert flags == [0x1, 0x1, 0x1, 0x5]


def test_question_behind_changes_is_answered_when_they_are_done(kernel: Kernel) -> None:
    kernel.answers(_link_message(ADDRESS, 3))
    answer = kernel.route.ask(RTM_GETLINK, _question(), after=[_change("a"), _change("b")])
    assert answer["header"]["sequence_number"] == 3
    assert answer.get_attr("IFLA_ADDRESS") == ADDRESS.hex(":")
    kernel.answers(refusal(errno.EPERM, 5) + _link_message(ADDRESS, 6))
    with pytest.raises(HostError, match="b: Operation not permitted"):
        kernel.route.ask(RTM_GETLINK, _question(), after=[_change("a"), _change("b")])


def test_refusal_without_words_is_the_errno(kernel: Kernel) -> None:
    kernel.answers(refusal(errno.EBUSY))
    with pytest.raises(HostError) as caught:
        kernel.route.change(_change("moving it"))
    assert str(caught.value) == "moving it: Device or resource busy (EBUSY)"


def test_change_that_is_not_answered_is_an_error_that_names_it(kernel: Kernel) -> None:
    kernel.answers(BlockingIOError(errno.ETIMEDOUT, ""))
    with pytest.raises(HostError, match="moving it: Connection timed out"):
        kernel.route.change(_change("moving it"))


def test_late_answers_to_an_earlier_request_are_skipped(kernel: Kernel) -> None:
    kernel.answers(BlockingIOError(errno.ETIMEDOUT, ""))
    with pytest.raises(NetlinkError) as caught:
        kernel.route.ask(RTM_GETLINK, _question())
    assert caught.value.code == errno.ETIMEDOUT
    kernel.answers(refusal(errno.EPERM, 1), _link_message(ADDRESS, 1) + _link_message(b"", 2))
    assert kernel.route.ask(RTM_GETLINK, _question())["header"]["sequence_number"] == 2


def test_dump_that_the_kernel_calls_interrupted_is_read_again(kernel: Kernel) -> None:
    kernel.answers(
        _link_message(ADDRESS, 1, MULTI), _link_message(ADDRESS, 1, MULTI | INTERRUPTED), done(1)
    )
    kernel.answers(_link_message(ADDRESS, 2, MULTI), done(2))
    assert len(kernel.route.table(RTM_GETLINK, _question())) == 1
    assert len(kernel.requests) == 2


def test_incomplete_dump_is_read_to_its_end_and_repeated(
    kernel: Kernel,
) -> None:
    kernel.answers(
        _link_message(ADDRESS, 1, MULTI),
        OSError(errno.ENOBUFS, ""),
        _link_message(ADDRESS, 1, MULTI) + done(1),
    )
    kernel.answers(_link_message(ADDRESS, 2, MULTI) * 2 + done(2))
    assert len(kernel.route.table(RTM_GETLINK, _question())) == 2


def test_dump_that_never_is_consistent_is_an_error(kernel: Kernel) -> None:
    for number in range(1, sockets.DUMPS + 1):
        kernel.answers(_link_message(ADDRESS, number, MULTI | INTERRUPTED), done(number))
    with pytest.raises(NetlinkError, match="changed during all"):
        kernel.route.table(RTM_GETLINK, _question())


def test_dump_that_ends_with_an_error_is_an_error(kernel: Kernel) -> None:
    kernel.answers(_link_message(ADDRESS, 1, MULTI), done(1, -errno.EMSGSIZE))
    with pytest.raises(NetlinkError) as caught:
        kernel.route.table(RTM_GETLINK, _question())
    assert caught.value.code == errno.EMSGSIZE


@pytest.mark.parametrize(("size", "fits"), [(100_000, True), (sockets.BUFFER + 1, False)])
def test_answer_is_read_whole_or_not_at_all(size: int, fits: bool) -> None:
    """The answer for a PF with hundreds of VFs exceeds usual buffers."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with Rtnetlink() as route, theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * size)
        route.socket.close()
        route.socket = ours
        theirs.send(bytes(size))
        if fits:
            assert route.receive() == bytes(size)
            return
        with pytest.raises(NetlinkError, match=f"an answer of more than {sockets.BUFFER} bytes"):
            route.receive()


def test_answer_that_comes_late_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with Rtnetlink() as route, theirs:
        route.socket.close()
        route.socket = ours
        late = threading.Timer(0.05, theirs.send, (b"late",))
        late.start()
        assert route.receive() == b"late"
        late.join()
        monkeypatch.setattr(sockets, "TIMEOUT", 0)
        with pytest.raises(NetlinkError, match="no answer within 0 s"):
            route.receive()
