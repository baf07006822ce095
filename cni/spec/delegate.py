"""Runs another CNI executable, usually an IPAM plugin.

Passes our environment and configuration on byte for byte, like pkg/invoke of the reference. Unlike
the reference, ignores CNI_PATH, and refuses an executable that a user other than root can write. A
delegate's deadline comes before the runtime's. The delegate is killed when this process ends.
"""

import ctypes
import errno
import os
import resource
import selectors
import signal
import stat
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from base import decoding, interrupts
from cni.spec import result
from cni.spec.errors import CNIError, Code
from cni.spec.notes import note
from cni.spec.request import Request
from cni.spec.result import UNREADABLE, Result

_BUSY_TRIES = 6
_BUSY_PAUSE = 1.0  # seconds
_UNDO_DEADLINE = 20.0  # seconds; even a late ADD still ends before the runtime's deadline
_LOOK = 0.1  # seconds between two checks whether the call was cancelled
_CHUNK = 1 << 16
_PR_SET_PDEATHSIG = 1
DESCRIPTOR_LIMITS = resource.getrlimit(resource.RLIMIT_NOFILE)
MAX_STDOUT = 16 << 20  # bytes
MAX_STDERR = 256 << 10
_prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up before a fork, not in the child


class _Misbehaves(Exception):
    """An error of a delegate. The caller puts the delegate's name before the text."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


class _ErrorDocument(msgspec.Struct):
    code: int = 0
    msg: str = ""
    details: str = ""


def find(plugin_type: str, directory: Path) -> Path:
    """The executable of the plugin. Raises CNIError 7 or 101."""
    if "/" in plugin_type or "\0" in plugin_type or plugin_type in ("", ".", ".."):
        raise CNIError(Code.INVALID_CONFIG, f"invalid plugin name: {plugin_type}")
    executable = directory / plugin_type
    try:
        if executable.is_file():
            _require_roots(directory)
            _require_roots(executable)
            return executable
    except OSError as error:
        raise CNIError(
            Code.DELEGATE,
            f"cannot look at {executable}: {error.strerror}: check the permissions of the file",
        ) from None
    raise CNIError(
        Code.INVALID_CONFIG,
        f'failed to find plugin "{plugin_type}" in path [{directory}]: put the plugin there, or '
        'correct "ipam.type"',
    )


def _require_roots(path: Path) -> None:
    """Raise CNIError 101 if a user other than root can write `path`. Links are followed."""
    status = path.stat()
    if status.st_uid != 0 or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CNIError(
            Code.DELEGATE,
            f"users other than root can write to {path} (owner {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):04o}): check the content, then run `chown "
            f"root:root {path}` and `chmod go-w {path}`",
        )


def add(plugin_type: str, directory: Path, request: Request) -> Result:
    """Run the delegate's ADD. If the ADD fails, run the DEL, as the specification demands."""
    executable = find(plugin_type, directory)
    try:
        return result.decode(_execute(executable, "ADD", request), request.cni_version)
    except BaseException:
        undo(plugin_type, directory, request)
        raise


def undo(plugin_type: str, directory: Path, request: Request) -> None:
    """Undo an ADD of the delegate with the delegate's DEL. A failure becomes a note."""
    deadline = min(request.delegate_deadline, _UNDO_DEADLINE)
    request = msgspec.structs.replace(request, delegate_deadline=deadline)
    try:
        with interrupts.held():
            run(plugin_type, directory, "DEL", request)
    except CNIError as error:
        note(f"cannot undo the ADD of {plugin_type}: {error}")


def run(plugin_type: str, directory: Path, command: str, request: Request) -> None:
    """Run a verb that has no result: CHECK, DEL, GC, STATUS."""
    _execute(find(plugin_type, directory), command, request)


def _execute(executable: Path, command: str, request: Request) -> bytes:
    environ = {**request.environ, "CNI_COMMAND": command}
    with (
        interrupts.waiting(),
        _spawn(executable, environ, request.config.raw) as process,
    ):
        try:
            stdout, stderr = _output(process, request.delegate_deadline)
        except BaseException as failure:
            _kill(process)
            if isinstance(failure, _Misbehaves):
                raise CNIError(failure.code, f"{executable} {command} {failure}") from None
            raise
    if process.returncode != 0:
        raise _failure(process.returncode, stdout, stderr)
    if stderr:
        note(stderr.decode(errors="replace").removesuffix("\n"))
    return stdout


def _output(process: "subprocess.Popen[bytes]", seconds: float) -> tuple[bytes, bytes]:
    """Standard output and the beginning of standard error. Raises _Misbehaves, Terminated."""
    assert process.stdout is not None
    assert process.stderr is not None
    deadline = time.monotonic() + seconds
    stdout, stderr = bytearray(), bytearray()
    with selectors.DefaultSelector() as pipes:
        pipes.register(process.stdout, selectors.EVENT_READ, stdout)
        pipes.register(process.stderr, selectors.EVENT_READ, stderr)
        while pipes.get_map() or process.poll() is None:
            interrupts.checkpoint()
            if time.monotonic() >= deadline:
                text = f"did not answer within {seconds:g} s and was killed"
                raise _Misbehaves(
                    Code.TRY_AGAIN, f"{text}: try again, and find out why this plugin hangs"
                )
            if not pipes.get_map():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK)
                continue
            for key, _ in pipes.select(min(_LOOK, max(0.0, deadline - time.monotonic()))):
                chunk = os.read(key.fd, _CHUNK)
                if not chunk:
                    pipes.unregister(key.fileobj)
                elif key.data is stdout:
                    stdout += chunk
                else:
                    stderr += chunk[: MAX_STDERR - len(stderr)]
            if len(stdout) > MAX_STDOUT:
                text = f"answered more than {MAX_STDOUT} bytes and was killed"
                raise _Misbehaves(Code.DELEGATE, f"{text}: repair or replace this plugin")
    return bytes(stdout), bytes(stderr)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill the delegate and its children, because a child could keep the output open."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _spawn(executable: Path, environ: dict[str, str], config: bytes) -> "subprocess.Popen[bytes]":
    # Standard input is a file in memory. A pipe would need a writer while the process reads.
    with os.fdopen(os.memfd_create("config"), "w+b") as stdin:
        stdin.write(config)
        stdin.seek(0)
        for remaining in reversed(range(_BUSY_TRIES)):
            try:
                return subprocess.Popen(
                    [str(executable)],
                    env=environ,
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    process_group=0,
                    preexec_fn=_before_exec,
                )
            except OSError as error:
                # An installer may be writing the file right now (ETXTBSY).
                if error.errno != errno.ETXTBSY or not remaining:
                    text = f"cannot start {executable}: {error.strerror}: install the plugin again"
                    raise CNIError(Code.DELEGATE, text) from None
                time.sleep(_BUSY_PAUSE)
    raise AssertionError("unreachable")


def _before_exec() -> None:
    """Make only system calls, because another thread may hold a lock during the fork.

    The kernel sends SIGKILL when the thread that started the delegate ends. An agent's worker
    threads outlive their calls. The delegate gets the original limit of descriptors, because old
    programs iterate over all numbers up to the limit.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_NOFILE, DESCRIPTOR_LIMITS)


def _failure(returncode: int, stdout: bytes, stderr: bytes) -> CNIError:
    if not stdout.strip():
        text = stderr.decode(errors="replace").strip()
        if text:
            return CNIError(Code.INTERNAL, f"netplugin failed: {text}")
        how = f": signal: {signal.strsignal(-returncode)}" if returncode < 0 else ""
        return CNIError(Code.INTERNAL, f"netplugin failed with no error message{how}")
    try:
        document = decoding.decode(stdout, _ErrorDocument)
    except UNREADABLE as error:
        text = stdout.decode(errors="replace")
        return CNIError(
            Code.INTERNAL,
            f'netplugin failed but error parsing its diagnostic message "{text}": {error}',
        )
    # Code 0 would mean success.
    return CNIError(document.code or Code.INTERNAL, document.msg, document.details)
