"""A process that calls a driver's library, one call at a time, for a test."""

import os
import select
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from tests.waiting import PATIENCE

CLIENT = Path(__file__).with_name("client.py")


class Out(msgspec.Struct, frozen=True):
    """Room for an output of `size` bytes. It is filled with 0xee before the call."""

    size: int = 8


Argument = int | str | bytes | Out | None

UNTOUCHED = int.from_bytes(b"\xee" * 8, "little")


class Answer(msgspec.Struct, frozen=True):
    """A call's result, and the contents of its rooms and bytes afterwards, in order."""

    result: int
    outputs: tuple[bytes, ...]

    @property
    def ints(self) -> list[int]:
        return [int.from_bytes(output, "little") for output in self.outputs]


class Refused(Exception):
    """A call that had to succeed failed."""

    def __init__(self, symbol: str, result: int) -> None:
        super().__init__(f"{symbol} answered {result}")
        self.result = result


class Driver:
    """A process with a library loaded. Each `thread` of calls is a separate thread."""

    def __init__(
        self,
        environment: Mapping[str, str],
        library: str = "libcuda.so.1",
        through: Sequence[str] = (),
    ) -> None:
        """Start the process, with `through` by that command, for example in a container."""
        self.process = subprocess.Popen(
            [*through, sys.executable, "-S", "-E", str(CLIENT), library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
        )
        self.pid = self.process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to the process, and wait for its end."""
        self.process.kill()
        self.ended()

    def ended(self) -> tuple[int, str]:
        """Wait for the process' end; returns its return code and its standard error."""
        _, err = self.process.communicate()
        return self.process.returncode, err.decode()

    def send(self, symbol: str | int, *arguments: Argument, thread: int = 0) -> None:
        """Start a call of a symbol, or of the function at an address."""
        what = "address" if isinstance(symbol, int) else "symbol"
        self._request(
            {"thread": thread, what: symbol, "arguments": [_sent(one) for one in arguments]}
        )

    def _request(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(request) + b"\n")
        self.process.stdin.flush()

    def receive(self) -> Answer:
        """The answer of a call that was sent. Raises EOFError if the process ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EOFError
        result, outputs = msgspec.json.decode(line, type=tuple[int, tuple[str, ...]])
        return Answer(result, tuple(bytes.fromhex(output) for output in outputs))

    def call(self, symbol: str | int, *arguments: Argument, thread: int = 0) -> Answer:
        self.send(symbol, *arguments, thread=thread)
        return self.receive()

    def result(self, symbol: str | int, *arguments: Argument, thread: int = 0) -> int:
        return self.call(symbol, *arguments, thread=thread).result

    def outcome(self, symbol: str, *arguments: Argument, seconds: float = PATIENCE) -> int | None:
        """A call's result, `None` if it ended the process. Raises AssertionError after
        `seconds`."""
        try:
            self.send(symbol, *arguments)
        except BrokenPipeError:
            return None
        assert self.process.stdout is not None
        said, _, _ = select.select([self.process.stdout], [], [], seconds)
        assert said, f"{symbol} has not answered after {seconds:g} s"
        try:
            return self.receive().result
        except EOFError:
            return None

    def do(self, symbol: str | int, *arguments: Argument, thread: int = 0) -> list[int]:
        """Make a call that must succeed; returns its outputs as numbers."""
        answer = self.call(symbol, *arguments, thread=thread)
        if answer.result != 0:
            raise Refused(str(symbol), answer.result)
        return answer.ints

    def start(self, device: int = 0) -> int:
        """Initialise the driver, and make the device's primary context current; returns its
        handle."""
        self.do("cuInit", 0)
        [context] = self.do("cuDevicePrimaryCtxRetain", Out(8), device)
        self.do("cuCtxSetCurrent", context)
        return context

    def address(self, symbol: str) -> int:
        """The address of an export in that process, as dlsym(3) finds it."""
        self._request({"thread": 0, "address_of": symbol})
        return self.receive().result

    def call_by_value(self, symbol: str, structure: bytes, *arguments: Argument) -> Answer:
        """Make a call with room for 8 bytes and a CUipcMemHandle by value."""
        sent: list[Any] = [_sent(Out()), {"value": structure.hex()}, *map(_sent, arguments)]
        self._request({"thread": 0, "symbol": symbol, "arguments": sent})
        return self.receive()

    def opened(self, path: str) -> int:
        """Open a file in that process; returns its descriptor."""
        self._request({"thread": 0, "open": path})
        return self.receive().result

    def touch(self, address: int) -> bool:
        """Whether the CPU of that process can write a byte at an address; it tries to."""
        self._request({"thread": 0, "touch": address})
        return self.receive().result == 0

    def proc(self, base: str, version: int, flags: int = 0) -> tuple[int, int, int]:
        """Call cuGetProcAddress of CUDA 12; returns result, address, status."""
        answer = self.call("cuGetProcAddress_v2", base, Out(8), version, flags, Out(4))
        address, status = answer.ints
        return answer.result, address, status


def _sent(argument: Argument) -> int | str | dict[str, int | str] | None:
    if isinstance(argument, Out):
        return {"out": argument.size}
    if isinstance(argument, bytes):
        return {"in": argument.hex()}
    return argument


def packed(form: str, *values: int | bytes) -> bytes:
    """A C structure of this machine, in struct's notation."""
    return struct.pack(f"@{form}", *values)
