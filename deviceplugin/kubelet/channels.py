"""gRPC channels to the Unix sockets of this node, with one connection each."""

from pathlib import Path

import grpc

OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.use_local_subchannel_pool", 1),  # no back-off because of earlier connections
    ("grpc.default_authority", "localhost"),
    # gRPC 1.85 repeats a call without end on a connection whose server has just said that it ends:
    # until the call's deadline it takes a CPU, and 400 MB of memory a second.
    ("grpc.enable_retries", 0),
)


def open_channel(socket: Path, *, max_receive: int | None = None) -> grpc.Channel:
    """A channel, which connects with the first call. It never repeats a call that failed.

    `max_receive` is the most bytes of an answer, 4 MiB by default.
    """
    sizes = () if max_receive is None else (("grpc.max_receive_message_length", max_receive),)
    return grpc.insecure_channel(f"unix:{socket}", (*OPTIONS, *sizes))
