"""Runs the pods of `podfabric check` with the rights of an administrator's kubeconfig.

The container of each pod needs a ConfigMap with its orders. The kubelet makes the sandbox with its
interfaces before it reads the ConfigMap, and starts the container when the ConfigMap exists. So the
orders have the addresses that the pods got, a pod needs only one HCA, and only pods of the run
connect to a pod. A pod ends with its report as termination message, which is in the pod's status.
The other ways need more: pods/proxy a way from the API server to pods, a service account a token.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any

import msgspec

from cli.fabric_check.ring import VARIABLE, Orders, PodReport, Rail, Rails
from kube.client import ClusterApi
from kube.resources import ApiError, Conflict, Meta, NotFound, Resource

RUN_LABEL = "fabric.podfabric.io/check"
NETWORKS = "k8s.v1.cni.cncf.io/networks"
STATUS = "k8s.v1.cni.cncf.io/network-status"
SCHEDULED = "PodScheduled"  # the type of a condition
KEY = "orders"
POLL = 2.0  # seconds
AFTER = 60  # seconds: how long a pod may outlive its run
_ATTEMPTS = 5


class CheckMeta(Meta, frozen=True, kw_only=True, rename="camel"):
    deletion_timestamp: str = ""


class CheckPod(Resource, frozen=True, kw_only=True):
    """A pod. podfabric reads few parts of `spec` and `status`."""

    API = "v1"
    KIND = "Pod"
    PLURAL = "pods"

    metadata: CheckMeta
    spec: dict[str, Any] = msgspec.field(default_factory=dict)
    status: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        return self.status.get("phase") in ("Succeeded", "Failed")

    @property
    def words(self) -> list[str]:
        """Reasons and messages of the pod, the scheduler and the container: foreign text."""
        scheduled = (it for it in self.status.get("conditions") or () if it["type"] == SCHEDULED)
        containers = self.status.get("containerStatuses") or ()
        states = (it for each in containers for it in (each.get("state") or {}).values())
        said = (self.status, *scheduled, *states)
        return [it[name] for it in said for name in ("reason", "message") if it.get(name)]

    @property
    def report(self) -> PodReport | None:
        """The report, if the pod has written one."""
        for each in self.words:
            with suppress(msgspec.MsgspecError):
                return msgspec.json.decode(each, type=PodReport)
        return None

    def rails(self, network: str) -> Rails:
        """The interfaces that a living pod got on the network, from the annotation of Multus."""
        text = "" if self.has_ended else self.metadata.annotations.get(STATUS, "")
        with suppress(msgspec.MsgspecError, LookupError):
            found = msgspec.json.decode(text, type=list[dict[str, Any]])
            on = (it for it in found if it["name"] == network)
            return tuple(Rail(it["interface"], it["ips"][0], it.get("mac", "")) for it in on)
        return ()


class OrdersMap(Resource, frozen=True, kw_only=True):
    API = "v1"
    KIND = "ConfigMap"
    PLURAL = "configmaps"

    metadata: Meta
    data: dict[str, str] = msgspec.field(default_factory=dict)


class PodsOfRun(msgspec.Struct):
    """The pods of one run, which may take `seconds`. All calls may raise ApiError."""

    api: ClusterApi
    run: str
    namespace: str
    image: str
    resource: str
    seconds: float

    def create(self, name: str, node: str, network: str) -> None:
        namespace, _, definition = network.partition("/")
        selected = msgspec.json.encode([{"name": definition, "namespace": namespace}]).decode()
        labels, notes = {RUN_LABEL: self.run}, {NETWORKS: selected}
        meta = CheckMeta(name=name, namespace=self.namespace, labels=labels, annotations=notes)
        self.api.create(CheckPod(metadata=meta, spec=self._spec(name, node)))

    def read(self) -> dict[str, CheckPod]:
        """The pods by name."""
        labels = f"{RUN_LABEL}={self.run}"
        items = self.api.list(CheckPod, namespace=self.namespace, labels=labels).items
        return {pod.metadata.name: pod for pod in items}

    def wait(self, is_done: Callable[[CheckPod], bool], until: float) -> dict[str, CheckPod]:
        """Wait until each pod is done or has ended, or until this time (monotonic)."""
        while True:
            pods = self.read()
            left = until - time.monotonic()
            if left <= 0 or all(is_done(pod) or pod.has_ended for pod in pods.values()):
                return pods
            time.sleep(min(POLL, left))

    def order(self, pod: CheckPod, orders: Orders) -> None:
        """Let the pod start. Its orders go with the pod."""
        of = pod.metadata
        owner = {"apiVersion": "v1", "kind": "Pod", "name": of.name, "uid": of.uid}
        meta = Meta(name=of.name, namespace=of.namespace, owner_references=(owner,))
        text = msgspec.json.encode(orders).decode()
        self.api.create(OrdersMap(metadata=meta, data={KEY: text}))

    def remove(self) -> bool:
        """Delete the pods. Returns False if a pod may be left."""
        for _ in range(_ATTEMPTS):
            with suppress(ApiError):
                pods = [it for it in self.read().values() if not it.metadata.deletion_timestamp]
                if not pods:
                    return True
                for pod in pods:
                    _delete(self.api, pod)
            time.sleep(POLL / 2)
        return False

    def _spec(self, name: str, node: str) -> dict[str, Any]:
        """The spec of a pod with no more rights than each pod has (Pod Security: restricted)."""
        limits = {"cpu": "1", "memory": "256Mi"} | ({self.resource: "1"} if self.resource else {})
        variable = {"configMapKeyRef": {"name": name, "key": KEY}}
        restricted = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}
        container = {
            "name": "check",
            "image": self.image,
            "args": ["check"],
            "env": [{"name": VARIABLE, "valueFrom": variable}],
            "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": limits},
            "securityContext": restricted | {"capabilities": {"drop": ["ALL"]}},
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
        # By the scheduler, as for a DaemonSet, so that no pod of a job loses its HCA meanwhile.
        here = [{"key": "metadata.name", "operator": "In", "values": [node]}]
        terms = {"nodeSelectorTerms": [{"matchFields": here}]}
        return {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": int(self.seconds) + AFTER,
            "terminationGracePeriodSeconds": 2,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}},
            "tolerations": [{"operator": "Exists"}],
            # The image has a user; OpenShift chooses another user.
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
        }


def remove_leftovers(api: ClusterApi, namespace: str, now: datetime) -> None:
    """Delete pods of dead runs: pods that are older than a pod may be. Raises ApiError."""
    for pod in api.list(CheckPod, namespace=namespace, labels=RUN_LABEL).items:
        age = now - datetime.fromisoformat(pod.metadata.creation_timestamp)
        if age.total_seconds() > int(pod.spec.get("activeDeadlineSeconds", 0)) + AFTER:
            _delete(api, pod)


def _delete(api: ClusterApi, pod: CheckPod) -> None:
    with suppress(NotFound, Conflict):  # a changed pod is deleted at the next attempt
        api.delete(pod)
