"""What systemd is told, and what it hands over: on sockets like its own."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agent import systemd
from agent.settings import Settings
from agent.systemd import Watchdog
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
    assert systemd.notify("READY=1", "STATUS=serving")
    assert manager.recv(4096) == b"READY=1\nSTATUS=serving"


def test_an_abstract_socket_is_told_too() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(PATIENCE)
        manager.bind("")  # the kernel gives it an abstract name
        name = "@" + manager.getsockname()[1:].decode()
        assert systemd.notify("READY=1", environ={"NOTIFY_SOCKET": name})
        assert manager.recv(4096) == b"READY=1"


def test_stopping_asks_for_the_time_that_it_takes(manager: socket.socket) -> None:
    assert systemd.notify_stopping(65.5)
    assert manager.recv(4096) == b"STOPPING=1\nEXTEND_TIMEOUT_USEC=65500000"


@pytest.mark.parametrize(
    "address", ["", "relative", "vsock:2:1", "/nowhere/at/all", "/" + "x" * 200]
)
def test_without_a_manager_nothing_happens(address: str) -> None:
    assert systemd.notify("READY=1", environ={"NOTIFY_SOCKET": address}) is False
    assert systemd.notify("READY=1", environ={}) is False


def test_a_manager_that_does_not_read_does_not_hold_us_up(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systemd, "NOTIFY_TIME", 0.1)
    for _ in range(10_000):
        if not systemd.notify("STATUS=" + "x" * 1000):
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
    assert caplog.messages == ["the agent does not serve: systemd is going to end it"]


@pytest.mark.parametrize(
    "environ", [{}, {"WATCHDOG_USEC": "100000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "x"}]
)
def test_without_a_watchdog_nobody_is_asked(environ: dict[str, str]) -> None:
    def asked() -> bool:
        raise AssertionError

    Watchdog(asked, environ).close()


def activated(code: str, *handed: socket.socket, names: str = "", pid: str = "own") -> str:
    """What `code` prints in a process that has these sockets from descriptor 3 on."""
    script = f"""
import os, sys, socket
from agent import systemd
handed = [os.dup(int(n)) for n in sys.argv[1:]]
for number, descriptor in enumerate(handed):
    os.dup2(descriptor, 200 + number)
for number in range(len(handed)):
    os.dup2(200 + number, 3 + number)
pid = str(os.getpid()) if {pid!r} == "own" else {pid!r}
os.environ.update(LISTEN_PID=pid, LISTEN_FDS=str(len(handed)), LISTEN_FDNAMES={names!r})
try:
{code}
finally:
    assert not [name for name in os.environ if name.startswith("LISTEN_")]
"""
    descriptors = [descriptor.fileno() for descriptor in handed]
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, descriptors)],
        pass_fds=descriptors,
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SERVE_ONE = """
    given = systemd.listening_socket()
    assert not given.get_inheritable()
    given.settimeout(120)
    peer, _ = given.accept()
    peer.sendall(b"hello")
    print(given.getsockname())
"""
REFUSE = """
    try:
        print(systemd.listening_socket())
    except systemd.Unsuitable as error:
        print(error)
"""


def listening(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    made.listen()
    return made


def test_the_socket_that_systemd_listens_on_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with listening(path) as given, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))  # before anybody serves: it waits
        assert activated(SERVE_ONE, given) == f"{path}\n"
        assert client.recv(9) == b"hello"


def test_more_than_one_socket_is_refused(tmp_path: Path) -> None:
    with listening(tmp_path / "a") as one, listening(tmp_path / "b") as other:
        assert "handed over 2 sockets" in activated(REFUSE, one, other)


@pytest.mark.parametrize("kind", ["not listening", "datagram", "tcp"])
def test_a_socket_of_another_kind_is_refused(tmp_path: Path, kind: str) -> None:
    family = socket.AF_INET if kind == "tcp" else socket.AF_UNIX
    with socket.socket(
        family, socket.SOCK_DGRAM if kind == "datagram" else socket.SOCK_STREAM
    ) as given:
        if kind == "tcp":
            given.bind(("127.0.0.1", 0))
            given.listen()
        else:
            given.bind(str(tmp_path / "x"))
        assert "the unit needs ListenStream=" in activated(REFUSE, given)


def test_a_descriptor_that_is_no_socket_is_refused() -> None:
    code = "    os.close(3) if os.path.exists('/proc/self/fd/3') else None\n" + REFUSE
    with socket.socket(socket.AF_UNIX) as given:
        assert "descriptor 3, handed over by systemd, is not a socket" in activated(code, given)


def test_sockets_for_another_process_are_left_alone(tmp_path: Path) -> None:
    with listening(tmp_path / "x") as given:
        assert activated(REFUSE, given, pid="1") == "None\n"
        assert activated(REFUSE, given, pid="") == "None\n"


def test_without_activation_there_is_no_socket() -> None:
    assert systemd.listening_socket({}) is None
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "x", "OTHER": "y"}
    assert systemd.listening_socket(environ) is None
    assert environ == {"OTHER": "y"}


def unit(name: str) -> dict[str, str]:
    lines = (UNITS / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and line[0] != "#")


def test_the_units_fit_the_agent() -> None:
    service, listener = unit("podfabric-agent.service"), unit("podfabric-agent.socket")
    assert float(service["TimeoutStopSec"]) > Settings().grace + 10
    assert listener["ListenStream"] == "/run/podfabric/agent.sock"
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
