"""Waits for kernel events after which HCAs may have changed: link messages and uevents.

rtnetlink reports a link's carrier, and so the state of an IPoIB port. Uevents report drivers,
devices and their nodes. Both concern the network namespace in which the sockets were created. The
kernel sends no event for a port without an interface; polling sysfs finds that change.

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
KERNEL = 1  # the kernel's group of uevents; 2 is udev's
SO_RCVBUFFORCE = 33  # asm-generic/socket.h

_SUBSYSTEMS = frozenset(
    (b"infiniband", b"infiniband_verbs", b"infiniband_mad", b"pci", b"net", b"auxiliary", b"misc")
)
QUEUE = 1 << 20  # bytes
_SETTLED, _LONGEST = 0.05, 0.2  # seconds


class Events:
    """A subscription to these events. One thread waits; any thread may wake it.

    Raises HostError if the sockets cannot be created.
    """

    def __init__(self) -> None:
        with contextlib.ExitStack() as made:
            try:
                self.sockets = tuple(
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
            self._events, self._events_or_wake = select.poll(), select.poll()
            for source in self.sockets:
                self._events.register(source, select.POLLIN)
                self._events_or_wake.register(source, select.POLLIN)
            self._events_or_wake.register(self._woken, select.POLLIN)
            self._undo = made.pop_all()

    def wait(self, timeout: float | None) -> bool:
        """Wait for an event. False after `timeout` seconds (None: no limit) or a `wake`.

        A burst of events counts once: this returns after 50 ms without an event, or 200 ms after
        the first one. Lost events (a full queue) count as a change.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if until is None else max(until - time.monotonic(), 0)
            self._events_or_wake.poll(None if left is None else _milliseconds(left))
            if self._changed():
                self._settle()
                return True
            if self._was_woken() or left == 0:
                return False

    def wake(self) -> None:
        """End the present `wait`, or the next one. Any thread may call this."""
        with contextlib.suppress(BlockingIOError):  # the counter is full, so it is woken
            os.eventfd_write(self._woken, 1)

    def close(self) -> None:
        """End the subscription. No thread may be waiting."""
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _settle(self) -> None:
        last = time.monotonic() + _LONGEST
        quiet = time.monotonic() + _SETTLED
        while (now := time.monotonic()) < min(quiet, last):
            if self._events.poll(_milliseconds(min(quiet, last) - now)) and self._changed():
                quiet = time.monotonic() + _SETTLED

    def _was_woken(self) -> bool:
        try:
            return os.eventfd_read(self._woken) > 0
        except BlockingIOError:
            return False

    def _changed(self) -> bool:
        """Read all pending events. Whether one of them matters."""
        routes, uevents = self.sockets
        links = [concerns_link(datagram) for datagram in received(routes)]
        devices = [concerns_device(datagram) for datagram in received(uevents)]
        return any(links) or any(devices)


def _milliseconds(seconds: float) -> int:
    return math.ceil(seconds * 1000)


def _subscribed(protocol: int, group: int) -> socket.socket:
    flags = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    subscribed = socket.socket(socket.AF_NETLINK, flags, protocol)
    try:
        with contextlib.suppress(PermissionError):  # the default of 200 KiB will do
            subscribed.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, QUEUE)
        subscribed.bind((0, group))
    except BaseException:
        subscribed.close()
        raise
    return subscribed


def received(source: socket.socket) -> list[bytes]:
    """All pending datagrams from the kernel; b"" stands for lost ones."""
    datagrams: list[bytes] = []
    while len(datagrams) < 10_000:  # return even during a flood
        try:
            datagram, sender = source.recvfrom(1 << 16)
        except BlockingIOError:
            break
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise explained("reading the kernel's events", error.errno or errno.EIO) from None
            datagrams.append(b"")
            continue
        if sender[0] == 0:
            datagrams.append(datagram)
    return datagrams


def concerns_link(datagram: bytes) -> bool:
    """Whether a datagram is about a link, or was lost."""
    if len(datagram) < HEADER.size:
        return True
    return HEADER.unpack_from(datagram)[1] in (RTM_NEWLINK, RTM_DELLINK)


def concerns_device(datagram: bytes) -> bool:
    """Whether a uevent is about a device of interest: "add@/devices/…\\0KEY=value\\0…"."""
    if not datagram:
        return True
    variables = datagram.split(b"\0")
    subsystem = (text for text in variables if text.startswith(b"SUBSYSTEM="))
    return next(subsystem, b"").partition(b"=")[2] in _SUBSYSTEMS
