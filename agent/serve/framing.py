"""The protocol between launcher and agent: one request and one answer on a unix socket.

All integers are unsigned, 32 bits, most significant byte first. The launcher sends

    "pfq1"  name length  environment length  configuration length  errno of standard input
    name    environment  configuration

where `name` is the name of the started executable. The environment is a list of `NAME=value`, with
a NUL after each. The configuration is the launcher's standard input. If the launcher cannot read
all of its input, it sends the errno of the failed read. The first byte carries at most one
descriptor: the file that CNI_NETNS names. The launcher keeps its side open until it has the answer.
So an end of file means that the launcher is gone. The agent answers

    "pfa1"  status  exit code  standard error length  standard output length
    standard error  standard output

with status 0 after a call. With status 1 the agent did not begin the call, and standard output has
a CNI error. After status 2, the launcher sends the call to the next agent.
"""

import struct

import msgspec

REQUEST_MAGIC, ANSWER_MAGIC = b"pfq1", b"pfa1"
HEADER = struct.Struct("!4s4I")
MAX_NAME = 255
MAX_ENVIRON = 1 << 20
MAX_CONFIG = 16 << 20
MAX_STDERR = 1 << 20
MAX_STDOUT = 16 << 20
ANSWERED, REFUSED, LEAVING = 0, 1, 2


class BadFrame(Exception):
    """Bytes that no launcher sends. The text names the defect."""


class RequestHeader(msgspec.Struct, frozen=True):
    """The lengths of a request's parts, in bytes. `read_header` has checked their limits."""

    name: int
    environ: int
    config: int
    stdin_errno: int

    @property
    def before_config(self) -> int:
        return self.name + self.environ

    @property
    def total(self) -> int:
        return HEADER.size + self.before_config + self.config


class LauncherRequest(msgspec.Struct, frozen=True):
    """The input of a launcher (`cni/launcher/launcher.c`)."""

    name: str
    environ: dict[str, str]
    config: bytes
    stdin_errno: int = 0


def read_header(head: bytes) -> RequestHeader:
    """Decode the 20 bytes of a header. Raises BadFrame."""
    magic, name, environ, config, stdin_errno = HEADER.unpack(head)
    if magic != REQUEST_MAGIC:
        raise BadFrame(f"the request begins with {magic!r} instead of {REQUEST_MAGIC!r}")
    for what, length, limit in (
        ("plugin's name", name, MAX_NAME),
        ("environment", environ, MAX_ENVIRON),
        ("configuration", config, MAX_CONFIG),
    ):
        if length > limit:
            raise BadFrame(f"the {what} has {length} bytes, at most {limit} are allowed")
    return RequestHeader(name, environ, config, stdin_errno)


def read_environ(header: RequestHeader, body: bytes | memoryview) -> dict[str, str]:
    """The environment from the bytes after the header. The configuration may be incomplete."""
    pairs = str(body[header.name : header.before_config], "utf-8", "surrogateescape").split("\0")
    environ: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if equals and name not in environ:  # the first of two equal names counts, as for getenv(3)
            environ[name] = value
    return environ


def read_request(header: RequestHeader, body: bytes | memoryview) -> LauncherRequest:
    """The request from all bytes after its header. Undecodable bytes become surrogates."""
    return LauncherRequest(
        name=str(body[: header.name], "utf-8", "surrogateescape"),
        environ=read_environ(header, body),
        config=bytes(body[header.before_config :]),
        stdin_errno=header.stdin_errno,
    )


def write_answer(status: int, exit_code: int, stderr: bytes, stdout: bytes) -> bytes:
    """The bytes of an answer. A standard error above MAX_STDERR bytes loses its beginning."""
    stderr = stderr[-MAX_STDERR:]
    head = HEADER.pack(ANSWER_MAGIC, status, exit_code, len(stderr), len(stdout))
    return head + stderr + stdout
