"""Runs a call: passes the request to its plugin, and returns the answer's frame."""

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence

from agent.serve import framing
from agent.serve.framing import ANSWERED
from base import interrupts
from base.interrupts import Call
from cni.spec.dispatch import Answer, answer, error_document
from cni.spec.errors import CNIError, Code
from cni.spec.notes import collected
from cni.spec.plugin import Plugin
from cni.spec.request import Request

Loader = Callable[[Mapping[str, str]], Plugin]  # the plugin for a call, by its environment

MAX_LINES = 50  # of a call's notes that the log gets
MAX_TEXT = 4096

_LEAVING = {"ADD": Code.TRY_AGAIN, "STATUS": Code.UNAVAILABLE}
_LEAVES = (
    "podfabric is leaving this node and attaches no pod (`podfabric agent --until-empty`): install "
    "it again, or remove the network from the pod"
)

_log = logging.getLogger(__name__)


class Calls:
    """Runs the calls of `plugins`. Each key of `plugins` is the name of a plugin's executable.

    `observe` gets the plugin, the verb, the CNI code (0 for success), and the seconds. If
    `until_empty`, each ADD fails. The functions of `failed` get each error of a plugin.
    """

    def __init__(
        self,
        plugins: Mapping[str, Loader],
        observe: Callable[[str, str, int, float], object],
        *,
        until_empty: bool = False,
        failed: Sequence[Callable[[Request, CNIError], object]] = (),
    ) -> None:
        self._on_failure = failed
        self._plugins = plugins
        self._observe = observe
        self._refused = _LEAVING if until_empty else {}

    def call(self, request: framing.LauncherRequest, netns: int | None, call: Call) -> bytes:
        """Run the call and return the answer's frame, with a result or a CNI error."""
        verb = request.environ.get("CNI_COMMAND", "")
        started = time.monotonic()
        with collected() as notes, interrupts.serving(call):
            reply = _short_enough(self._answer(request, netns))
            seconds = time.monotonic() - started
            noted = notes.text
            code = self._log(reply, noted, seconds)
        self._observe(request.name, verb, code, seconds)
        stderr = noted.encode(errors="backslashreplace")
        return framing.write_answer(ANSWERED, reply.exit_code, stderr, reply.document)

    def _answer(self, request: framing.LauncherRequest, netns: int | None) -> Answer:
        code = self._refused.get(request.environ.get("CNI_COMMAND", ""))
        if code is not None:
            return Answer(error_document(CNIError(code, _LEAVES)), 1)
        load = self._plugins.get(request.name)
        if load is None:
            names = ", ".join(sorted(self._plugins))
            error = CNIError(
                Code.INVALID_ENVIRONMENT,
                f'the agent has no plugin "{request.name}" (it has {names}): install its '
                "executables with `podfabric install`",
            )
            return Answer(error_document(error), 1)

        def read_config() -> bytes:
            if request.stdin_errno:
                raise OSError(request.stdin_errno, os.strerror(request.stdin_errno))
            return request.config

        return answer(
            lambda: load(request.environ), request.environ, read_config, netns, self._failed
        )

    def _failed(self, request: Request, error: CNIError) -> None:
        for each in self._on_failure:
            each(request, error)

    def _log(self, reply: Answer, notes: str, seconds: float) -> int:
        lines = [line for line in notes.splitlines() if line.strip()]
        for line in lines[:MAX_LINES]:
            _log.warning("%s", line)
        if len(lines) > MAX_LINES:
            _log.warning("(%d more lines are in the launcher's output)", len(lines) - MAX_LINES)
        if reply.exit_code == 0:
            _log.info("done in %.1f ms", seconds * 1e3)
            return 0
        # json and not msgspec: undecodable bytes of the environment are surrogates
        error = json.loads(reply.document)
        code = int(error["code"])
        text = str(error["msg"])[:MAX_TEXT]
        _log.warning("failed in %.1f ms: %s", seconds * 1e3, text)
        return code


def _short_enough(reply: Answer) -> Answer:
    if len(reply.document) <= framing.MAX_STDOUT:
        return reply
    error = CNIError(
        Code.INTERNAL,
        f"the answer has {len(reply.document)} bytes, at most {framing.MAX_STDOUT} are allowed: "
        "call DEL, and use a smaller configuration",
    )
    return Answer(error_document(error), 1)
