"""What a worker knows of its client, without the server's thread."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from agent import framing
from agent.connections import LauncherConnection
from agent.framing import LauncherRequest
from base.interrupts import Call

REQUEST = LauncherRequest("ipoib", {}, b"{}")


@pytest.fixture
def client() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        yield listener


@pytest.fixture
def connection(client: socket.socket) -> Iterator[LauncherConnection]:
    """An accepted connection whose request is whole; the server does not poll it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + os.urandom(8).hex())
        listener.listen()
        client.connect(listener.getsockname())
        peer, _ = listener.accept()
    connection = LauncherConnection(peer, 1, 0.0)
    client.sendall(framing.write_request(REQUEST))
    request = connection.receive(1 << 20)
    assert request is not None
    connection.called(request, Call(endable=True, gone=connection.gone), 0.0)
    yield connection
    connection.close(lambda _: None)


def test_client_that_waits_for_its_answer_is_there(connection: LauncherConnection) -> None:
    assert not connection.gone()
    assert connection.begin() is not None
    assert not connection.gone()


def test_client_that_was_killed_has_gone(
    connection: LauncherConnection, client: socket.socket
) -> None:
    """From when its parent can see that it has ended."""
    descriptor = client.fileno()
    os.set_inheritable(descriptor, True)
    waits = "import sys; print(flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", waits],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[descriptor],
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        client.close()
        assert not connection.gone()
        process.kill()
        process.wait()
        assert connection.gone()


def test_call_whose_client_has_gone_is_not_begun(
    connection: LauncherConnection, client: socket.socket
) -> None:
    client.close()
    assert connection.begin() is None


def test_connection_that_is_closed_has_no_client(connection: LauncherConnection) -> None:
    connection.close(lambda _: None)
    assert connection.gone()
