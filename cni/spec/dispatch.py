"""Reads a call, and answers with one JSON document and an exit code.

`serve` answers the only call of a process. `answer` does not change the process, so the agent uses
`answer`, too. SIGTERM ends any call except DEL and GC, and an ADD undoes its steps.
"""

import fcntl
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from base import interrupts
from base.interrupts import Call, Terminated
from cni.spec import request as requests
from cni.spec import versions
from cni.spec.entry import CURRENT_VERSION
from cni.spec.errors import CNIError, Code
from cni.spec.limits import not_decoded
from cni.spec.notes import note
from cni.spec.plugin import Plugin
from cni.spec.request import Request
from cni.spec.result import Result, encode

CLEANING_UP = ("DEL", "GC")
"""Verbs that are never interrupted."""


class Answer(NamedTuple):
    """The document for standard output, which may be empty, and the exit code."""

    document: bytes
    exit_code: int


def answer(
    load: Callable[[], Plugin],
    environ: Mapping[str, str],
    read_config: Callable[[], bytes],
    netns_descriptor: int | None = None,
    failed: Callable[[Request, CNIError], object] = lambda request, error: None,
) -> Answer:
    """Answer one call. Every error becomes a document. `failed` gets a request and its CNIError."""
    version = CURRENT_VERSION
    request = None
    try:
        request = requests.read(environ, read_config, netns_descriptor)
        if request.command not in ("ADD", "DEL", "CHECK", "GC", "STATUS"):
            raise CNIError(Code.INVALID_ENVIRONMENT, f"unknown CNI_COMMAND: {request.command}")
        plugin = load()
        version = request.config.version
        versions.require_verb(request.command, version, plugin.versions)
        versions.require_supported(version, plugin.versions)
        request = msgspec.structs.replace(request, cni_version=version)
        return Answer(_run(plugin, request), 0)
    except CNIError as error:
        failure = error
        if request is not None:
            failed(request, error)
    except Terminated:
        command = environ.get("CNI_COMMAND", "")
        state = "has undone its steps" if command == "ADD" else "is not complete"
        text = f"{command} was interrupted and {state}: run {command} again"
        failure = CNIError(Code.TRY_AGAIN, text)
    except RecursionError:
        failure = not_decoded("it is nested too deeply")
    except Exception as error:  # noqa: BLE001 - the outermost edge: a runtime must get a document
        note(traceback.format_exc().rstrip())
        text = f"internal error: {type(error).__name__}: {error} (traceback on standard error)"
        failure = CNIError(Code.INTERNAL, text)
    failure.__traceback__ = failure.__context__ = None  # they would keep the call's objects alive
    if environ.get("CNI_COMMAND") == "DEL":
        failure = _not_taken_for_success(failure)
    return Answer(error_document(failure, version), 1)


def serve(load: Callable[[], Plugin]) -> int:
    """Answer this process's call on its standard output and return the exit code."""
    # A library's output must not reach the runtime's JSON parser. The copy's number is 3 or above,
    # so that the copy does not become standard input if standard input is closed.
    output = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3)
    try:
        os.dup2(2, 1)
    except OSError:  # standard error is closed
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    call = Call(endable=os.environ.get("CNI_COMMAND") not in CLEANING_UP)

    def begin() -> Plugin:
        signal.signal(signal.SIGTERM, lambda *of_signal: call.end())
        return load()

    with interrupts.serving(call):
        reply = answer(begin, os.environ, _read_stdin)
    try:
        view = memoryview(reply.document)
        while view:
            view = view[os.write(output, view) :]
        os.close(output)
        sys.stderr.flush()
    except OSError:  # the runtime has closed its end: only the exit code is left
        return 1
    return reply.exit_code


def _run(plugin: Plugin, request: Request) -> bytes:
    if request.command in ("ADD", "DEL"):
        _refuse_own_netns(request)
    if request.command == "ADD":
        result = plugin.add(request)
        if isinstance(result, Result):
            return encode(result, request.cni_version)
        return msgspec.json.encode(result)
    verbs = {"DEL": plugin.delete, "CHECK": plugin.check, "GC": plugin.gc, "STATUS": plugin.status}
    verbs[request.command](request)
    return b""


def _refuse_own_netns(request: Request) -> None:
    """Raise CNIError 8 if CNI_NETNS is the plugin's own namespace.

    The reference (pkg/skel) checks this after the plugin has run. Here the check comes first, so
    there is nothing to undo.
    """
    if request.netns_override or not request.netns:
        return
    try:
        descriptor = request.netns_descriptor
        theirs = os.stat(request.netns if descriptor is None else descriptor)  # noqa: PTH116
        ours = os.stat("/proc/thread-self/ns/net")  # noqa: PTH116
    except OSError:
        return  # the verb handles a path that cannot be opened: DEL succeeds, ADD explains
    if os.path.samestat(theirs, ours):
        raise CNIError(
            Code.INVALID_NETNS,
            "plugin's netns and netns from CNI_NETNS should not be the same",
        )


def _not_taken_for_success(error: CNIError) -> CNIError:
    """The error without the phrases that containerd's go-cni takes for a successful DEL."""
    texts = []
    for text in (error.message, error.details):  # go-cni searches both texts
        text = re.sub("no such file or directory", "missing file", text, flags=re.I)
        texts.append(re.sub("not found", "absent", text, flags=re.I))
    return CNIError(error.code, *texts)


def error_document(error: CNIError, version: str = CURRENT_VERSION) -> bytes:
    """The error as a JSON object. The text begins with the code: Multus passes on only the text."""
    text = f"[podfabric {error.code}] {error.message}"
    document = {"cniVersion": version, "code": error.code, "msg": text}
    if error.details:
        document["details"] = error.details
    # json and not msgspec: undecodable bytes of the environment are surrogates, which JSON escapes
    return json.dumps(document, separators=(",", ":")).encode()


def _read_stdin() -> bytes:
    chunks = []
    size = 0
    while chunk := os.read(0, 65536):
        size += len(chunk)
        if size > requests.MAX_CONFIG_BYTES:
            most = requests.MAX_CONFIG_BYTES
            raise OSError(f"it has more than {most} bytes: shorten the configuration")
        chunks.append(chunk)
    return b"".join(chunks)
