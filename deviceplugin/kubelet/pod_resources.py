"""Opens gRPC channels to unix sockets of this node. Calls the kubelet's PodResources API."""

import threading
import time
from pathlib import Path

import grpc

from base import files, interrupts
from base.paths import Paths
from deviceplugin.api import podresources_pb2, podresources_pb2_grpc
from deviceplugin.kubelet.records import KubeletUnreadable

MAX_RECEIVE = 16 << 20  # bytes of a List: gRPC's own limit is 4 MiB
OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.use_local_subchannel_pool", 1),  # no back-off because of earlier connections
    ("grpc.default_authority", "localhost"),
    # gRPC 1.85 repeats a call endlessly on a connection whose server has announced its end. Until
    # the call's deadline, this takes a whole CPU and 400 MB of memory per second.
    ("grpc.enable_retries", 0),
)


def open_channel(socket: Path, *, max_receive: int | None = None) -> grpc.Channel:
    """A channel that never repeats a failed call. `max_receive` is in bytes, 4 MiB by default."""
    sizes = () if max_receive is None else (("grpc.max_receive_message_length", max_receive),)
    return grpc.insecure_channel(f"unix:{socket}", (*OPTIONS, *sizes))


class PodResourcesClient:
    """Calls the kubelet, and connects again after a restart. Any thread may use it.

    Calls run one at a time: gRPC 1.85 may crash if a thread closes a channel during a call.
    """

    def __init__(self, paths: Paths) -> None:
        self._socket = paths.pod_resources
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._stub: podresources_pb2_grpc.PodResourcesListerStub | None = None  # on the channel
        self._made: tuple[int, ...] = ()  # the version of the channel's socket

    def close(self) -> None:
        with self._lock:
            self._drop()

    def list(self, timeout: float) -> podresources_pb2.ListPodResourcesResponse:
        """The devices of all containers. Raises KubeletUnreadable within `timeout` seconds."""
        end = time.monotonic() + timeout
        request = podresources_pb2.ListPodResourcesRequest()
        with interrupts.waiting():
            if not self._lock.acquire(timeout=timeout):
                raise KubeletUnreadable(
                    f"{self._socket}: the kubelet has not answered an earlier call for "
                    f"{timeout:g} s"
                )
            try:
                answer: podresources_pb2.ListPodResourcesResponse = self._connected().List(
                    request, timeout=end - time.monotonic()
                )
                return answer
            except grpc.RpcError as error:
                self._drop()  # or the channel waits longer and longer before it connects again
                raise KubeletUnreadable(f"{self._socket}: {_why(self._socket, error)}") from None
            finally:
                self._lock.release()

    def _connected(self) -> podresources_pb2_grpc.PodResourcesListerStub:
        made = files.version(self._socket)
        if self._stub is None or made != self._made:  # a kubelet makes a new socket when it starts
            self._drop()
            self._channel = open_channel(self._socket, max_receive=MAX_RECEIVE)
            self._stub = podresources_pb2_grpc.PodResourcesListerStub(self._channel)  # type: ignore[no-untyped-call]
            self._made = made
        return self._stub

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = self._stub = None


def _why(socket: Path, error: grpc.RpcError) -> str:
    if not socket.exists():
        return "does not exist: check that the kubelet runs, and that its directory is mounted here"
    code = error.code().name
    text = " ".join((error.details() or "").split())
    return f"List: {code}: {text}: look at the kubelet's log"
