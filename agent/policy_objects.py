"""What is read of the API server for policies: the policies, namespaces, pods."""

from typing import Any

import msgspec

from cni.policy import cluster
from ipam.cluster.api import Meta, Resource


class FabricPolicy(Resource, frozen=True, kw_only=True):
    """Rules of an administrator. Its `spec` may be of a later version, so it is read afterwards."""

    API = "fabric.podfabric.io/v1alpha1"
    KIND = cluster.KIND
    PLURAL = "fabricpolicies"

    spec: dict[str, Any] = msgspec.field(default_factory=dict)

    def stored(self) -> cluster.StoredPolicy:
        """As it is kept on the node; its rules were not looked at."""
        listed = self.spec.get("rules")
        return cluster.StoredPolicy(
            name=self.metadata.name,
            uid=self.metadata.uid,
            generation=self.metadata.generation,
            rules=listed if isinstance(listed, list) else [listed],
        )


class NamespaceObject(Resource, frozen=True, kw_only=True):
    """A Namespace, of which the labels are read."""

    API = "v1"
    KIND = "Namespace"
    PLURAL = "namespaces"

    metadata: Meta


class _PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    service_account_name: str = ""


class AskingPod(Resource, frozen=True, kw_only=True):
    """A Pod, of which the service account is read."""

    API = "v1"
    KIND = "Pod"
    PLURAL = "pods"

    metadata: Meta
    spec: _PodSpec = _PodSpec()
