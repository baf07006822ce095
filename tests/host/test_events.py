"""The kernel's events about links, in a network namespace of the test."""

import socket
import subprocess
import threading
from collections.abc import Iterator

import pytest

from host import events
from host.events import Events
from host.namespaces import NetworkNamespace
from tests.netns import IP, namespace
from tests.waiting import PATIENCE

SHORT = 0.3  # for what must not come


@pytest.fixture
def name() -> Iterator[str]:
    with namespace() as path:
        yield path.name


@pytest.fixture
def subscribed(name: str) -> Iterator[Events]:
    """A subscription inside, after the events of the new namespace itself."""
    with NetworkNamespace.open(f"/var/run/netns/{name}") as space:
        with space.entered():
            made = Events()
        with made:
            while made.wait(SHORT):
                pass
            yield made


def _ip(name: str, *command: str) -> None:
    subprocess.run([IP, "-n", name, *command], check=True)


def _add_links(name: str, number: int) -> None:
    """All at once: one process adds that many pairs."""
    commands = "".join(f"link add d{n} type veth peer e{n}\n" for n in range(number))
    subprocess.run([IP, "-n", name, "-batch", "-"], input=commands, text=True, check=True)


def test_link_that_comes_goes_up_loses_its_carrier_and_is_removed(
    subscribed: Events, name: str
) -> None:
    _ip(name, "link", "add", "one", "type", "veth", "peer", "two")
    assert subscribed.wait(PATIENCE)
    for command in (
        ("link", "set", "one", "up"),
        ("link", "set", "two", "up"),
        ("link", "set", "two", "down"),
        ("link", "delete", "one"),
    ):
        while subscribed.wait(SHORT):
            pass
        _ip(name, *command)
        assert subscribed.wait(PATIENCE), command


def test_no_event_without_a_change(subscribed: Events, name: str) -> None:
    assert not subscribed.wait(0)
    assert not subscribed.wait(SHORT)
    _ip(name, "address", "add", "192.0.2.1/32", "dev", "lo")
    assert not subscribed.wait(SHORT)


def test_events_of_another_namespace_are_ignored(subscribed: Events) -> None:
    with namespace() as other:
        _ip(other.name, "link", "add", "one", "type", "veth", "peer", "two")
        assert not subscribed.wait(SHORT)


def test_burst_of_events_counts_once(
    subscribed: Events, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_SETTLED", 1.0)
    monkeypatch.setattr(events, "_LONGEST", PATIENCE)
    results: list[bool] = []

    def listen() -> None:
        while subscribed.wait(None):
            results.append(True)

    listening = threading.Thread(target=listen)
    listening.start()
    _add_links(name, 20)
    subscribed.wake()
    listening.join(PATIENCE)
    assert 1 <= len(results) < 5


def test_events_without_end_do_not_keep_the_waiter(
    subscribed: Events, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_SETTLED", 1.0)
    ended = threading.Event()

    def flap() -> None:
        while not ended.is_set():
            _ip(name, "link", "set", "lo", "up")
            _ip(name, "link", "set", "lo", "down")

    flapping = threading.Thread(target=flap)
    flapping.start()
    try:
        waiting = threading.Thread(target=lambda: subscribed.wait(PATIENCE), daemon=True)
        waiting.start()
        waiting.join(PATIENCE)
        assert not waiting.is_alive()
    finally:
        ended.set()
        flapping.join()


def test_lost_events_are_a_change(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "QUEUE", 4096)
    monkeypatch.setattr(events, "concerns_link", lambda datagram: datagram == b"")
    monkeypatch.setattr(events, "concerns_device", lambda datagram: False)
    with NetworkNamespace.open(f"/var/run/netns/{name}") as space, space.entered():
        made = Events()
    with made:
        _add_links(name, 20)
        assert made.wait(PATIENCE)
        assert not made.wait(SHORT)


def test_wake_ends_a_wait_from_another_thread(subscribed: Events) -> None:
    results: list[bool] = []
    waiting = threading.Thread(target=lambda: results.append(subscribed.wait(None)))
    waiting.start()
    subscribed.wake()
    waiting.join(PATIENCE)
    assert results == [False]


def test_wake_ends_the_next_wait_once(subscribed: Events) -> None:
    subscribed.wake()
    subscribed.wake()
    assert not subscribed.wait(None)  # without a wake it would never return
    assert not subscribed.wait(0)


@pytest.mark.parametrize("subsystem", ["infiniband", "infiniband_verbs", "pci", "auxiliary"])
def test_uevents_of_hcas_are_a_change(subsystem: str) -> None:
    message = f"add@/devices/x\0ACTION=add\0DEVPATH=/devices/x\0SUBSYSTEM={subsystem}\0SEQNUM=9\0"
    assert events.concerns_device(message.encode())


@pytest.mark.parametrize(
    "message",
    [
        "change@/devices/x\0ACTION=change\0SUBSYSTEM=block\0",
        "change@/devices/x\0ACTION=change\0SUBSYSTEM=\0",
        "change@/devices/x\0ACTION=change\0OF=SUBSYSTEM=pci\0",
        "libudev\0",
    ],
)
def test_other_uevents_are_ignored(message: str) -> None:
    assert not events.concerns_device(message.encode())


def test_uevents_come_over_the_socket(subscribed: Events, name: str) -> None:
    """Both sockets report a new link, so the test reads this one alone."""
    _, uevents = subscribed.sockets
    _ip(name, "link", "add", "one", "type", "veth", "peer", "two")
    datagrams = events.received(uevents)
    assert any(b"SUBSYSTEM=net\0" in datagram and b"/one\0" in datagram for datagram in datagrams)
    assert all(
        events.concerns_device(datagram) for datagram in datagrams if b"SUBSYSTEM=net\0" in datagram
    )


def test_messages_from_programs_are_ignored(subscribed: Events, name: str) -> None:
    with NetworkNamespace.open(f"/var/run/netns/{name}") as space, space.entered():
        other = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, events.NETLINK_KOBJECT_UEVENT)
    with other:
        port, _ = subscribed.sockets[1].getsockname()
        other.sendto(b"add@/devices/x\0SUBSYSTEM=pci\0", (port, 0))
        assert not subscribed.wait(SHORT)


def test_descriptors_are_closed() -> None:
    made = Events()
    sockets: tuple[socket.socket, ...] = made.sockets
    made.close()
    assert [closed.fileno() for closed in sockets] == [-1, -1]
