"""The messages to systemd, on sockets like its own."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agent import presence
from agent.presence import Watchdog
from agent.settings import Settings
from tests.plugins import CHECKOUT
from tests.waiting import PATIENCE, until

UNITS = CHECKOUT / "agent/units"


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Systemd's end."""
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.settimeout(PATIENCE)
        made.bind(path)
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        yield made


def test_states_arrive_one_a_line(manager: socket.socket) -> None:
    assert presence.notify("READY=1", "STATUS=serving")
    assert manager.recv(4096) == b"READY=1\nSTATUS=serving"


def test_an_abstract_socket_is_told_too() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(PATIENCE)
        manager.bind("")  # the kernel gives it an abstract name
        name = "@" + manager.getsockname()[1:].decode()
        assert presence.notify("READY=1", environ={"NOTIFY_SOCKET": name})
        assert manager.recv(4096) == b"READY=1"


def test_stopping_asks_for_the_time_that_it_takes(manager: socket.socket) -> None:
    assert presence.notify_stopping(65.5)
    assert manager.recv(4096) == b"STOPPING=1\nEXTEND_TIMEOUT_USEC=65500000"


@pytest.mark.parametrize(
    "address", ["", "relative", "vsock:2:1", "/nowhere/at/all", "/" + "x" * 200]
)
def test_without_a_manager_nothing_happens(address: str) -> None:
    assert presence.notify("READY=1", environ={"NOTIFY_SOCKET": address}) is False
    assert presence.notify("READY=1", environ={}) is False


def test_a_manager_that_does_not_read_does_not_hold_us_up(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "NOTIFY_TIME", 0.1)
    for _ in range(10_000):
        if not presence.notify("STATUS=" + "x" * 1000):
            break
    else:
        pytest.fail("it took everything")


def test_the_watchdog_is_told_for_as_long_as_the_server_lives(
    manager: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    lives = [True]
    environ = {**os.environ, "WATCHDOG_USEC": "200000", "WATCHDOG_PID": str(os.getpid())}
    started = time.monotonic()
    with closing(Watchdog(lambda: lives[0], environ)):
        assert [manager.recv(99) for _ in range(3)] == [b"WATCHDOG=1"] * 3
        assert time.monotonic() - started > 0.15
        lives[0] = False
        until(lambda: caplog.messages)
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                manager.recv(99)
        time.sleep(0.25)
        with pytest.raises(BlockingIOError):
            manager.recv(99)
        lives[0] = True
        manager.settimeout(PATIENCE)
        assert manager.recv(99) == b"WATCHDOG=1"
    assert caplog.messages == ["the agent does not serve: systemd will end it"]


@pytest.mark.parametrize(
    "environ", [{}, {"WATCHDOG_USEC": "100000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "x"}]
)
def test_without_a_watchdog_nobody_is_asked(environ: dict[str, str]) -> None:
    def asked() -> bool:
        raise AssertionError

    Watchdog(asked, environ).close()


def unit(name: str) -> dict[str, str]:
    lines = (UNITS / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and line[0] != "#")


def test_the_units_fit_the_agent() -> None:
    service = unit("podfabric-agent.service")
    assert float(service["TimeoutStopSec"]) > Settings().grace + 10
    assert service["RuntimeDirectoryPreserve"] == "yes"
    assert not service.keys() & {
        *("PrivateMounts", "PrivateTmp", "PrivateDevices", "PrivateNetwork", "ProtectSystem"),
        *("ProtectHome", "ProtectKernelTunables", "ReadOnlyPaths", "MountFlags", "DynamicUser"),
    }, "a mount namespace of its own would hide the namespaces of pods"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_understands_the_units(tmp_path: Path) -> None:
    for path in UNITS.iterdir():
        # Where `podfabric` is installed is not its business.
        text = path.read_text().replace("/usr/bin/env podfabric", "/usr/bin/env true")
        (tmp_path / path.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", *sorted(map(str, tmp_path.iterdir()))],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
