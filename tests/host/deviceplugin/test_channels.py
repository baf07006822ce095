"""Calls to servers that shut down."""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from deviceplugin.api import v1beta1_pb2, v1beta1_pb2_grpc
from deviceplugin.kubelet.pod_resources import open_channel
from tests.waiting import PATIENCE

SETTINGS, GOAWAY = 4, 7  # types of HTTP/2 frames (RFC 9113, section 6)
INTERNAL_ERROR = 2


def frame(kind: int, payload: bytes = b"") -> bytes:
    """An HTTP/2 frame of the connection."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, 0, 0) + payload


@pytest.fixture
def ending_server(root: Path) -> Iterator[Path]:
    """The socket of a server that announces its end to each client, and stays connected."""
    root.mkdir()
    path = root / "server.sock"
    goaway = struct.pack(">II", 0, INTERNAL_ERROR) + b"Cancelling all calls"
    clients: list[socket.socket] = []

    def serve(listener: socket.socket) -> None:
        try:
            while True:
                client, _ = listener.accept()
                clients.append(client)
                with suppress(BrokenPipeError):  # the client has hung up already
                    client.sendall(frame(SETTINGS) + frame(GOAWAY, goaway))
        except OSError:  # shut down
            return

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        yield path
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE)
    for client in clients:
        client.close()


def test_call_to_a_server_that_ends_fails_at_once(ending_server: Path) -> None:
    """gRPC would repeat the call until the deadline, at 400 MB per second, if it were allowed
    to."""
    for _ in range(5):
        with open_channel(ending_server) as channel:
            stub = v1beta1_pb2_grpc.RegistrationStub(channel)  # type: ignore[no-untyped-call]
            with pytest.raises(grpc.RpcError) as failure:
                stub.Register(v1beta1_pb2.RegisterRequest(version="v1beta1"), timeout=20)
            assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
