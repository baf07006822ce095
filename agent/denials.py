"""Attachments that the policy denies: counted, and told to their pods."""

import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from base.pod import Pod
from cni.policy.allowance import NotAllowed
from cni.spec.errors import CNIError, Code
from cni.spec.plugin import Plugin
from cni.spec.request import Request
from cni.spec.result import Result

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_INDEX = re.compile(r"\[[0-9]+\]")
_KEY = re.compile(r"[A-Za-z_.]{1,64}")
MOST = 1000  # pairs of a key and rules: administrators write rules, but many may come and go
OTHER = "other"
SETTINGS = "config.yaml"
"""In place of a rule, where no rule is for the pod and the settings of the node denied it."""


class Denials:
    """Counts denials by key and by the rules that were left before it."""

    def __init__(self, tell: Callable[[Pod, str], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def watched(self, plugin: Plugin) -> Plugin:
        """The plugin, with an ADD whose denial is counted and told."""
        return _Watched(plugin, self._denied)

    def counts(self) -> Mapping[tuple[str, str], int]:
        """How many ADDs were denied, by key and rule."""
        with self._lock:
            return dict(self._counts)

    def families(self) -> "Sequence[Metric]":
        """What a scrape shows."""
        from prometheus_client.metrics_core import CounterMetricFamily

        family = CounterMetricFamily(
            "podfabric_policy_denied",
            "ADDs that the policy denied, by the key of the configuration, and by the rules that "
            f"allowed the rest ({SETTINGS}: no rule is for the pod).",
            labels=("key", "rule"),
        )
        for labels, count in sorted(self.counts().items()):
            family.add_metric(labels, count)
        return (family,)

    def _denied(self, request: Request, error: CNIError) -> None:
        labels = (OTHER, SETTINGS)
        if isinstance(error, NotAllowed):
            labels = (_label(error.key), ",".join(error.rules))
        with self._lock:
            if labels not in self._counts and len(self._counts) >= MOST:
                labels = (OTHER, OTHER)
            self._counts[labels] += 1
        with suppress(CNIError):  # CNI_ARGS that name no pod
            self._tell(request.arguments.pod, error.message)


def _label(key: str) -> str:
    """A configuration's key without indexes; "other" for what names a pool or a device, which the
    endpoint shows to nobody."""
    plain = _INDEX.sub("", key)
    return plain if _KEY.fullmatch(plain) else OTHER


class _Watched:
    def __init__(self, plugin: Plugin, denied: Callable[[Request, CNIError], None]) -> None:
        self._plugin = plugin
        self._denied = denied
        self.delete = plugin.delete
        self.check = plugin.check
        self.gc = plugin.gc
        self.status = plugin.status

    @property
    def versions(self) -> Sequence[str]:
        return self._plugin.versions

    def add(self, request: Request) -> Result | dict[str, Any]:
        try:
            return self._plugin.add(request)
        except CNIError as error:
            if error.code == Code.NOT_ALLOWED:
                self._denied(request, error)
            raise
