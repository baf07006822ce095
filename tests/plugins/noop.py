"""A plugin without a network, which follows the environment variable NOOP.

NOOP is a JSON object, see `Script`. Without it, ADD answers one address, and everything succeeds.
With "ipam" in the configuration it passes every verb on to that delegate. It returns a prevResult
unchanged. For every call that reaches a verb it writes the configuration's bytes to a file below
PODFABRIC_STATE.
"""

import os
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from base.paths import Paths
from cni.spec import delegate
from cni.spec import result as results
from cni.spec.entry import VERSIONS
from cni.spec.errors import CNIError
from cni.spec.request import Request
from cni.spec.result import IPConfig, Result

_NONE = msgspec.Raw()


class Script(msgspec.Struct):
    """The actions of every verb, in this order."""

    versions: tuple[str, ...] = VERSIONS
    prints: str = ""
    sleeps: float = 0.0
    waits_for: str = ""  # a FIFO: hangs in the kernel until another process opens it
    killed_by: int = 0
    fails: tuple[int, str] | None = None
    raises: str = ""
    result: msgspec.Raw = _NONE
    patience: float = 90.0  # seconds, with a delegate


class Noop:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self._script = msgspec.json.decode(environ.get("NOOP", "{}"), type=Script)
        self._state = Path(environ["PODFABRIC_STATE"])
        self._delegates = Paths.from_environ(environ).cni_bin

    @property
    def versions(self) -> Sequence[str]:
        return self._script.versions

    def add(self, request: Request) -> Result | dict[str, Any]:
        self._act(request)
        if request.previous_result is not None:
            previous = request.config.keys["prevResult"]
            return results.after_previous(previous, Result(), request.cni_version)
        ipam = request.config.ipam
        if ipam.type:
            return delegate.add(ipam.type, self._delegates, self._patient(request))
        if self._script.result:
            return results.decode(bytes(self._script.result), "1.1.0")
        return Result(ips=(IPConfig("10.9.0.1/24"),))

    def delete(self, request: Request) -> None:
        self._act(request)
        self._pass_on(request)

    def check(self, request: Request) -> None:
        self._act(request)
        self._pass_on(request)

    def gc(self, request: Request) -> None:
        self._act(request)
        self._pass_on(request)

    def status(self, request: Request) -> None:
        self._act(request)
        self._pass_on(request)

    def _patient(self, request: Request) -> Request:
        return msgspec.structs.replace(request, delegate_deadline=self._script.patience)

    def _act(self, request: Request) -> None:
        script = self._script
        self._state.mkdir(parents=True, exist_ok=True)
        (self._state / f"{request.command}-{uuid.uuid4().hex}").write_bytes(request.config.raw)
        if script.prints:
            print(script.prints)  # noqa: T201 - a library that prints
            os.system(f"echo {script.prints}")
        time.sleep(script.sleeps)
        if script.waits_for:
            Path(script.waits_for).read_bytes()
        if script.killed_by:
            os.kill(os.getpid(), script.killed_by)
        if script.fails is not None:
            raise CNIError(*script.fails)
        if script.raises:
            raise RuntimeError(script.raises)

    def _pass_on(self, request: Request) -> None:
        ipam = request.config.ipam
        if ipam.type:
            delegate.run(ipam.type, self._delegates, request.command, self._patient(request))
