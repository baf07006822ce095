"""The rules that an agent goes by, of the node and of the cluster, and what it tells of denials."""

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from agent import cluster_addresses
from agent.denials import Denials
from base import msgspec_warmup
from base.paths import Paths
from base.pod import Pod
from cni.policy import cluster, rules
from cni.policy.cluster import ClusterPolicies
from cni.policy.document import Subjects, unknown
from cni.spec.errors import CNIError

if TYPE_CHECKING:
    from agent.policy_follower import PolicyFollower

DENIED = "PolicyDenied"


class AgentPolicies(Subjects):
    """Who asks, and by `source` the rules: for the plugins, whose `denials` are counted and told.

    `node` returns the rules of config.yaml. Where these follow the cluster, `start` begins that.
    """

    def __init__(
        self, paths: Paths, node: rules.Source, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._paths = paths
        self._node = node
        self._environ = environ
        self._follower: PolicyFollower | None = None
        self._starting = threading.Lock()
        self._closed = False
        self.source = cluster.joined(node, self._present)
        self.denials = Denials(self._tell)

    def start(self) -> None:
        """Take the node's rules, and follow the cluster's if the node does now."""
        with self._starting, suppress(CNIError):  # which a call gets, too
            if not self._closed and self._node().cluster:
                self._follow()

    def _follow(self) -> None:
        if self._follower is not None:
            self._follower.wake()  # other rules of the node may look at labels
            return
        self._follower = self._new_follower()
        if self._follower is not None:
            self._follower.start()

    def _new_follower(self) -> "PolicyFollower | None":
        setting, until_then = '"policy.cluster" is true', "no pod is attached"
        api = cluster_addresses.api_of(self._environ, setting, until_then)
        if api is None:
            return None
        from agent.policy_follower import PolicyFollower

        msgspec_warmup.build()  # of the modules that were imported just now
        return PolicyFollower(api, self._paths.cluster_policies, self._node)

    def close(self) -> None:
        """Follow no more. What is in force stays so for the calls that run."""
        with self._starting:
            self._closed = True
        if self._follower is not None:
            self._follower.close()

    def labels(self, namespace: str) -> Mapping[str, str]:
        return self._present().labels(namespace)

    def service_account(self, pod: Pod) -> str:
        if self._follower is None:
            raise unknown("who asks", "it does not follow the cluster")
        return self._follower.service_account(pod)

    def _tell(self, pod: Pod, message: str) -> None:
        # An event for each text, not for each try of the runtime.
        if self._follower is not None:
            self._follower.events.of_pod(DENIED, message, pod, each_message=True)
            self._follower.wake()

    def _present(self) -> ClusterPolicies:
        if self._follower is not None:
            return self._follower.present()
        return cluster.load(self._paths.cluster_policies)
