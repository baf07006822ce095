"""A process that calls a driver's library as it is told, in lines of JSON.

Run by `Driver` of tests/standin/driver.py. It imports nothing of podfabric: it also runs in a
container.

A call is {"thread", "symbol" or "address", "arguments"}; its answer is [result, outputs], and that
of {"thread", "address_of"} a symbol's address. An
argument is a number, a text, null, {"out": n} for room of n bytes, or {"in": hex} for bytes; the
contents of both come back, in order. Calls of one thread are made by one thread of this process.
"""

import ctypes
import json
import queue
import sys
import threading
from typing import Any

Argument = ctypes.c_void_p | ctypes.c_uint64 | ctypes.c_char_p


def _argument(
    given: int | str | dict[str, Any] | None, kept: list[ctypes.Array[ctypes.c_char]]
) -> Argument:
    if given is None:
        return ctypes.c_void_p(None)
    if isinstance(given, int):
        return ctypes.c_uint64(given % 2**64)
    if isinstance(given, str):
        return ctypes.c_char_p(given.encode())
    content = bytes.fromhex(given["in"]) if "in" in given else b"\xee" * given["out"]
    kept.append(ctypes.create_string_buffer(content, len(content)))
    return ctypes.cast(kept[-1], ctypes.c_void_p)


def _call(library: ctypes.CDLL, request: dict[str, Any]) -> list[Any]:
    if "address_of" in request:
        return [ctypes.cast(library[request["address_of"]], ctypes.c_void_p).value, []]
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
        requests.put(None)  # a call that was begun is made to its end


if __name__ == "__main__":
    main()
