"""A process that makes the calls of a driver's library that lines of JSON describe.

`Driver` of tests/standin/driver.py runs it. It imports nothing of podfabric, because it also runs
in a container.

A call is {"thread", "symbol" or "address", "arguments"}; its answer is [result, outputs]. The
answer of {"thread", "address_of"} is a symbol's address, and of {"thread", "open"} a file's
descriptor. An argument is a number, a text, null, {"out": n} for room of n bytes, or {"in": hex}
for bytes. The answer has the contents of both kinds, in order. {"value": hex} is a CUipcMemHandle.
Each `thread` is a separate thread of this process.
"""

import ctypes
import json
import os
import queue
import sys
import threading
from typing import Any


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which calls take by value."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


Argument = ctypes.c_void_p | ctypes.c_uint64 | ctypes.c_char_p | IpcHandle


def _argument(
    given: int | str | dict[str, Any] | None, kept: list[ctypes.Array[ctypes.c_char]]
) -> Argument:
    if given is None:
        return ctypes.c_void_p(None)
    if isinstance(given, int):
        return ctypes.c_uint64(given % 2**64)
    if isinstance(given, str):
        return ctypes.c_char_p(given.encode())
    if "value" in given:
        return IpcHandle.from_buffer_copy(bytes.fromhex(given["value"]))
    content = bytes.fromhex(given["in"]) if "in" in given else b"\xee" * given["out"]
    kept.append(ctypes.create_string_buffer(content, len(content)))
    return ctypes.cast(kept[-1], ctypes.c_void_p)


def _touch(address: int) -> int:
    """Write to memory through the kernel, which answers with an error if a write would fault."""
    read, write = os.pipe()
    os.write(write, b"x")
    result = ctypes.CDLL(None, use_errno=True).read(read, ctypes.c_void_p(address), 1)
    os.close(read)
    os.close(write)
    return 0 if result == 1 else ctypes.get_errno()


def _call(library: ctypes.CDLL, request: dict[str, Any]) -> list[Any]:
    if "address_of" in request:
        return [ctypes.cast(library[request["address_of"]], ctypes.c_void_p).value, []]
    if "open" in request:
        return [os.open(request["open"], os.O_RDWR), []]
    if "touch" in request:
        return [_touch(request["touch"]), []]
    kept: list[ctypes.Array[ctypes.c_char]] = []
    arguments = [_argument(given, kept) for given in request["arguments"]]
    if "address" in request:
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, *(type(one) for one in arguments))
        result = prototype(request["address"])(*arguments)
    else:
        result = library[request["symbol"]](*arguments)
    return [result, [bytes(room).hex() for room in kept]]


def _serve(library: ctypes.CDLL, requests: "queue.Queue[dict[str, Any] | None]") -> None:
    while request := requests.get():
        answer = json.dumps(_call(library, request))
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


def main() -> None:
    library = ctypes.CDLL(sys.argv[1])
    threads: dict[int, queue.Queue[dict[str, Any] | None]] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if request["thread"] not in threads:
            requests = threads[request["thread"]] = queue.Queue()
            threading.Thread(target=_serve, args=(library, requests)).start()
        threads[request["thread"]].put(request)
    for requests in threads.values():
        requests.put(None)  # a running call is finished first


if __name__ == "__main__":
    main()
