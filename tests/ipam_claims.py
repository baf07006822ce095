"""IPAMClaims in tests: what KubeVirt and its users write, and the kind for a real API server."""

import json

from ipam.cluster.ipam_claims import ANNOTATION, IPAMClaim, IPAMClaimSpec, PodObject
from ipam.cluster.objects import Meta
from tests.unit.ipam.calls import request
from tests.unit.ipam.cluster.nodes import ClusterNode

_CIDR: dict[str, object] = {
    "type": "string",
    "x-kubernetes-validations": [{"rule": "isCIDR(self)", "message": "CIDR is invalid"}],
}
_TEXT: dict[str, object] = {"type": "string"}
_TIME: dict[str, object] = {"type": "string", "format": "date-time"}


def _kept(what: str) -> dict[str, object]:
    rule = {"rule": "self == oldSelf", "message": f"{what} is immutable"}
    return {"type": "string", "x-kubernetes-validations": [rule]}


_CONDITION: dict[str, object] = {
    "type": "object",
    "required": ["lastTransitionTime", "message", "reason", "status", "type"],
    "properties": {
        "lastTransitionTime": _TIME,
        "message": _TEXT,
        "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0},
        "reason": {"type": "string", "minLength": 1},
        "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
        "type": _TEXT,
    },
}
KIND: dict[str, object] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "ipamclaims.k8s.cni.cncf.io"},
    "spec": {
        "group": "k8s.cni.cncf.io",
        "scope": "Namespaced",
        "names": {
            "kind": "IPAMClaim",
            "listKind": "IPAMClaimList",
            "plural": "ipamclaims",
            "singular": "ipamclaim",
        },
        "versions": [
            {
                "name": "v1alpha1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {
                                "type": "object",
                                "required": ["interface", "network"],
                                "properties": {
                                    "interface": _kept("Interface"),
                                    "network": _kept("Network"),
                                    "ipRequests": {"type": "array", "maxItems": 2, "items": _CIDR},
                                },
                            },
                            "status": {
                                "type": "object",
                                "required": ["ips", "ownerPod"],
                                "properties": {
                                    "conditions": {"type": "array", "items": _CONDITION},
                                    "ips": {"type": "array", "maxItems": 2, "items": _CIDR},
                                    "ownerPod": _TEXT,
                                },
                            },
                        },
                    }
                },
            }
        ],
    },
}
"""The CustomResourceDefinition, as github.com/k8snetworkplumbingwg/ipamclaims has it: the names,
what is required and what never changes."""


def claim(
    name: str = "vm",
    network: str = "n1",
    interface: str = "net1",
    requests: tuple[str, ...] = (),
) -> IPAMClaim:
    """A claim in the namespace of the pods."""
    spec = IPAMClaimSpec(network=network, interface=interface, ip_requests=requests)
    return IPAMClaim(metadata=Meta(name=name, namespace="ns"), spec=spec)


def selection(**element: str) -> str:
    """The annotation of a pod, with one network."""
    return json.dumps([{"name": "n1", **element}])


def pod(name: str, annotation: str = "") -> PodObject:
    """A pod; by default it names the claim "vm" for its first network."""
    written = annotation or selection(**{"ipam-claim-reference": "vm"})
    return PodObject(metadata=Meta(name=name, namespace="ns", annotations={ANNOTATION: written}))


def delete(node: ClusterNode, name: str, network: str = "n1") -> None:
    """DEL of the pod's interface net1."""
    node.plugin.delete(request("DEL", None, f"{name}-1", pod=name, ifname="net1", network=network))
