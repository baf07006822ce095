"""The kubelet's PodResources API, over a connection that lasts as long as the kubelet's socket."""

import threading
from pathlib import Path

import grpc

from deviceplugin.api import podresources_pb2, podresources_pb2_grpc
from deviceplugin.kubelet.records import Unreadable
from host.paths import Paths

MAX_RECEIVE = 16 << 20  # bytes of a List: gRPC's own limit is 4 MiB

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_RECEIVE),
    ("grpc.use_local_subchannel_pool", 1),  # no waiting for what failed before
    ("grpc.default_authority", "localhost"),
)


class Connection:
    """To the kubelet that is there when it is asked. Any thread may use it."""

    def __init__(self, paths: Paths) -> None:
        self._socket = paths.pod_resources
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._made: tuple[int, int, int] | None = None  # what socket the channel is to

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it. The next question makes another."""
        with self._lock:
            self._drop()

    def list(self, timeout: float) -> podresources_pb2.ListPodResourcesResponse:
        """What every container holds. Raises Unreadable, after `timeout` seconds at the latest."""
        channel = self._current()
        stub = podresources_pb2_grpc.PodResourcesListerStub(channel)  # type: ignore[no-untyped-call]
        try:
            answer: podresources_pb2.ListPodResourcesResponse = stub.List(
                podresources_pb2.ListPodResourcesRequest(), timeout=timeout
            )
        except grpc.RpcError as error:
            self.close()  # it would wait longer and longer before it tries to connect again
            raise Unreadable(f"{self._socket}: {_why(self._socket, error)}") from None
        except ValueError as error:  # another thread found out first, and closed it
            raise Unreadable(f"{self._socket}: {error}") from None
        return answer

    def _current(self) -> grpc.Channel:
        """A channel to the socket of now: a kubelet that starts anew makes a new one."""
        made = _identity(self._socket)
        with self._lock:
            if self._channel is None or made != self._made:
                self._drop()
                self._channel, self._made = (
                    grpc.insecure_channel(f"unix:{self._socket}", _OPTIONS),
                    made,
                )
            return self._channel

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None


def _identity(socket: Path) -> tuple[int, int, int] | None:
    try:
        found = socket.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _why(socket: Path, error: grpc.RpcError) -> str:
    if not socket.exists():
        return "is not there: is the kubelet running, and its directory mounted here?"
    code = error.code().name
    text = " ".join((error.details() or "").split())
    return f"List: {code}: {text}: look at the kubelet's log"
