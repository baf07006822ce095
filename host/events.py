"""The kernel's word that something about HCAs may have changed: links, and uevents.

A link's carrier, and so an IPoIB port's, comes by rtnetlink; drivers, devices and their nodes
come and go by uevents. Both are of the network namespace that the sockets are made in. A port
whose HCA has no interface says nothing: that is seen by the next look at sysfs.

Sources: rtnetlink(7), RTNLGRP_LINK; the kernel's lib/kobject_uevent.c.
"""

import contextlib
import errno
import math
import os
import select
import socket
import time
from typing import Self

from host.errors import explained
from host.netlink import HEADER
from host.rtnetlink import RTM_DELLINK, RTM_NEWLINK

NETLINK_KOBJECT_UEVENT = 15  # linux/netlink.h
RTMGRP_LINK = 1  # linux/rtnetlink.h
KERNEL = 1  # the uevents' group that the kernel sends to; udev's own is 2
SO_RCVBUFFORCE = 33  # asm-generic/socket.h

_SUBSYSTEMS = frozenset(
    (b"infiniband", b"infiniband_verbs", b"infiniband_mad", b"pci", b"net", b"auxiliary", b"misc")
)
_QUEUE = 1 << 20  # bytes
_SETTLED, _LONGEST = 0.05, 0.2  # seconds


class Events:
    """A subscription from the time that it is made. One thread waits, any may wake it.

    HostError where the sockets cannot be had.
    """

    def __init__(self) -> None:
        with contextlib.ExitStack() as made:
            try:
                self._sockets = tuple(
                    made.enter_context(_subscribed(protocol, group))
                    for protocol, group in (
                        (socket.NETLINK_ROUTE, RTMGRP_LINK),
                        (NETLINK_KOBJECT_UEVENT, KERNEL),
                    )
                )
                self._woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            except OSError as error:
                what = "subscribing to the kernel's link and device events"
                raise explained(what, error.errno or errno.EIO) from None
            made.callback(os.close, self._woken)
            # poll(2), because select(2) takes no descriptor above 1023.
            self._told, self._told_or_woken = select.poll(), select.poll()
            for one in self._sockets:
                self._told.register(one, select.POLLIN)
                self._told_or_woken.register(one, select.POLLIN)
            self._told_or_woken.register(self._woken, select.POLLIN)
            self._undo = made.pop_all()

    def wait(self, timeout: float | None) -> bool:
        """Whether something changed; False after `timeout` seconds (None: never) or a `wake`.

        What comes in one burst is told once: this returns when it was quiet for 50 ms, or 200 ms
        after the first of it. What was lost (the queue was full) counts as a change.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if until is None else max(until - time.monotonic(), 0)
            self._told_or_woken.poll(None if left is None else _milliseconds(left))
            if self._changed():
                self._settle()
                return True
            if self._was_woken() or left == 0:
                return False

    def wake(self) -> None:
        """End a `wait`, the present or else the next one. From any thread."""
        with contextlib.suppress(BlockingIOError):  # woken often enough
            os.eventfd_write(self._woken, 1)

    def close(self) -> None:
        """End the subscription; nobody may be waiting."""
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _settle(self) -> None:
        last = time.monotonic() + _LONGEST
        quiet = time.monotonic() + _SETTLED
        while (now := time.monotonic()) < min(quiet, last):
            if self._told.poll(_milliseconds(min(quiet, last) - now)) and self._changed():
                quiet = time.monotonic() + _SETTLED

    def _was_woken(self) -> bool:
        try:
            return os.eventfd_read(self._woken) > 0
        except BlockingIOError:
            return False

    def _changed(self) -> bool:
        """Take all that is there, and tell whether any of it matters."""
        routes, uevents = self._sockets
        links = [_is_of_links(datagram) for datagram in _received(routes)]
        devices = [_is_of_devices(datagram) for datagram in _received(uevents)]
        return any(links) or any(devices)


def _milliseconds(seconds: float) -> int:
    return math.ceil(seconds * 1000)


def _subscribed(protocol: int, group: int) -> socket.socket:
    flags = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    made = socket.socket(socket.AF_NETLINK, flags, protocol)
    try:
        with contextlib.suppress(PermissionError):  # then the usual 200 KiB do
            made.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, _QUEUE)
        made.bind((0, group))
    except BaseException:
        made.close()
        raise
    return made


def _received(source: socket.socket) -> list[bytes]:
    """All that waits, from the kernel; b"" in place of what was lost."""
    found: list[bytes] = []
    while len(found) < 10_000:  # a flood must not keep us here
        try:
            datagram, sender = source.recvfrom(1 << 16)
        except BlockingIOError:
            break
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise explained("reading the kernel's events", error.errno or errno.EIO) from None
            found.append(b"")
            continue
        if sender[0] == 0:
            found.append(datagram)
    return found


def _is_of_links(datagram: bytes) -> bool:
    if len(datagram) < HEADER.size:
        return True
    return HEADER.unpack_from(datagram)[1] in (RTM_NEWLINK, RTM_DELLINK)


def _is_of_devices(datagram: bytes) -> bool:
    """A uevent is "add@/devices/…", then "KEY=value" each, all of them with a NUL behind."""
    if not datagram:
        return True
    found = (one for one in datagram.split(b"\0") if one.startswith(b"SUBSYSTEM="))
    return next(found, b"").partition(b"=")[2] in _SUBSYSTEMS
