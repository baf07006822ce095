"""The bytes that a launcher sends."""

from agent.serve.framing import HEADER, REQUEST_MAGIC, LauncherRequest


def write_request(request: LauncherRequest) -> bytes:
    """The frame of a request."""
    name = request.name.encode(errors="surrogateescape")
    environ = b"".join(
        f"{key}={value}\0".encode(errors="surrogateescape")
        for key, value in request.environ.items()
    )
    lengths = len(name), len(environ), len(request.config), request.stdin_errno
    return HEADER.pack(REQUEST_MAGIC, *lengths) + name + environ + request.config
