"""Gives an agent's plugins the rules of the node and of the cluster. Counts and reports denials."""

import os
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric

from agent import leasing
from base import decoding
from base.paths import Paths
from base.scrape import counter
from cni.spec.errors import CNIError, Code
from cni.spec.request import Request
from policy import rules, stored_policies
from policy.allowance import NotAllowed
from policy.document import NODE
from policy.stored_policies import ClusterPolicies

if TYPE_CHECKING:
    from policy.follower import PolicyFollower

DENIED = "PolicyDenied"
MOST = 1000  # pairs of a key and rules, because the rules may change often
OTHER = "other"
_INDEX = re.compile(r"\[[0-9]+\]")
_KEY = re.compile(r"[A-Za-z_.]{1,64}")


class AgentPolicies:
    """`source` returns the rules for the plugins. `node` returns the rules of config.yaml."""

    def __init__(
        self, paths: Paths, node: rules.Source, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._paths = paths
        self._node = node
        self._environ = environ
        self._follower: PolicyFollower | None = None
        self._starting = threading.Lock()
        self._closed = False
        self._counting = threading.Lock()
        self._denials: Counter[tuple[str, str]] = Counter()
        self.source = stored_policies.joined(node, self._present)

    def start(self) -> None:
        """Start to watch the cluster's rules on the API server if `policy.cluster` is true.

        May be called again.
        """
        with self._starting, suppress(CNIError):  # each call fails with the same error
            if self._closed or self._follower is not None or not self._node().cluster:
                return
            setting, until_then = '"policy.cluster" is true', "no pod is attached"
            api = leasing.api_of(self._environ, setting, until_then)
            if api is not None:
                from policy.follower import PolicyFollower

                decoding.build_decoders()  # of the modules imported above
                self._follower = PolicyFollower(api, self._paths.cluster_policies)
                self._follower.start()

    def close(self) -> None:
        """Stop watching the cluster's rules. Running calls keep their rules."""
        with self._starting:
            self._closed = True
        if self._follower is not None:
            self._follower.close()

    def _present(self) -> ClusterPolicies:
        if self._follower is not None:
            return self._follower.present()
        return stored_policies.load(self._paths.cluster_policies)

    def failed(self, request: Request, error: CNIError) -> None:
        """Count an ADD that was denied, and write an event for its pod."""
        if request.command != "ADD" or error.code != Code.NOT_ALLOWED:
            return
        labels = (OTHER, OTHER)
        if isinstance(error, NotAllowed):
            labels = (_label(error.key), ",".join(error.rules))
        with self._counting:
            if labels not in self._denials and len(self._denials) >= MOST:
                labels = (OTHER, OTHER)
            self._denials[labels] += 1
        if self._follower is not None:
            with suppress(CNIError):  # CNI_ARGS do not name a pod
                # One event for each error text, although the runtime repeats the ADD.
                events, pod = self._follower.events, request.arguments.pod
                events.of_pod(DENIED, error.message, pod, each_message=True)
                self._follower.wake()

    def denials(self) -> Mapping[tuple[str, str], int]:
        with self._counting:
            return dict(self._denials)

    def families(self) -> Sequence[Metric]:
        return (
            counter(
                "podfabric_policy_denied",
                "Denied ADDs, by denied key. rule has the rules that allow all other "
                f"keys, or {NODE} if no other rule matches the pod.",
                ("key", "rule"),
                self.denials(),
            ),
        )


def _label(key: str) -> str:
    """A configuration's key as a metric's label, without indexes such as "[0]".

    A key with characters other than letters, "." and "_" becomes "other", because such a key may
    contain the name of a pool or device.
    """
    plain = _INDEX.sub("", key)
    return plain if _KEY.fullmatch(plain) else OTHER
