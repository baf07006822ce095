"""One call without a process: environments, configurations, and a plugin that does nothing."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cni.spec.dispatch import Answer, answer
from cni.spec.entry import VERSIONS
from cni.spec.request import Request
from cni.spec.result import IPConfig, Result

ENVIRON = {
    "CNI_COMMAND": "ADD",
    "CNI_CONTAINERID": "c1",
    "CNI_NETNS": "/var/run/netns/nobody-made-this",
    "CNI_IFNAME": "eth0",
    "CNI_PATH": "/nonexistent",
}
CONFIG = {"cniVersion": "1.0.0", "name": "n1", "type": "trivial"}


class Trivial:
    """A plugin that records its calls; `raises` makes every verb fail."""

    def __init__(self, raises: BaseException | None = None) -> None:
        self.versions: Sequence[str] = VERSIONS
        self.requests: list[Request] = []
        self._raises = raises

    def add(self, request: Request) -> Result:
        self._called(request)
        return Result(ips=(IPConfig("10.9.0.1/24"),))

    def delete(self, request: Request) -> None:
        self._called(request)

    def check(self, request: Request) -> None:
        self._called(request)

    def gc(self, request: Request) -> None:
        self._called(request)

    def status(self, request: Request) -> None:
        self._called(request)

    def _called(self, request: Request) -> None:
        self.requests.append(request)
        if self._raises is not None:
            raise self._raises


def call(
    environ: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | bytes | Callable[[], bytes] = CONFIG,
    plugin: Trivial | None = None,
) -> Answer:
    """Answer a call of `plugin`; `environ` is laid over a valid one."""
    if isinstance(config, bytes):
        raw = config
    elif callable(config):
        return answer(lambda: plugin or Trivial(), ENVIRON | dict(environ or {}), config)
    else:
        raw = json.dumps(config).encode()
    return answer(lambda: plugin or Trivial(), ENVIRON | dict(environ or {}), lambda: raw)


def error(reply: Answer) -> dict[str, Any]:
    """The error document of a failed call."""
    assert reply.exit_code == 1
    document = json.loads(reply.document)
    assert isinstance(document, dict)
    return document
