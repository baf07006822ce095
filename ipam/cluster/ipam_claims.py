"""IPAMClaims (k8s.cni.cncf.io): addresses that stay with a claim, whichever pod uses it next.

A pod names its claim in the annotation by which Multus attaches networks ("ipam-claim-reference"),
and Multus does not pass that on. So an ADD whose definition says "allowPersistentIPs" reads the pod
and the claim from the API server. How the addresses are kept for the claim: `sticky`.
"""

from typing import Any

import msgspec
from msgspec.structs import replace

from base import decoding
from base.pod import Pod
from cni.spec.errors import CNIError, Code
from cni.spec.limits import ADDRESSES
from ipam.addresses import parse_interface
from ipam.cluster.api import ApiError, ClusterApi, Conflict, NotFound, Refused
from ipam.cluster.objects import SMALL_METADATA, Condition, Resource
from ipam.cluster.wants import NamedClaim
from ipam.store import Grant, Owner

ANNOTATION = "k8s.v1.cni.cncf.io/networks"
_MIRROR = "kubernetes.io/config.mirror"
_WRITES = 3  # of a status that others change
_RIGHT = "set ipam.ipamClaims to true in the values of podfabric's chart"
_LATER = "nothing was reserved; the runtime tries again"


class ClaimRefused(CNIError):
    """The pod can get no addresses by the IPAMClaim that it names."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.TRY_AGAIN, message)


class IPAMClaimSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The network and the interface that the claim is for, and addresses that its maker asks for
    (with a prefix length)."""

    network: str
    interface: str
    ip_requests: tuple[str, ...] = msgspec.field(default=(), name="ipRequests")


class IPAMClaimStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The addresses, with a prefix length, and the last pod that got them."""

    ips: tuple[str, ...] = ()
    owner_pod: str = msgspec.field(default="", name="ownerPod")
    conditions: tuple[Condition, ...] = ()


class IPAMClaim(Resource, frozen=True, kw_only=True):
    """As github.com/k8snetworkplumbingwg/ipamclaims has it."""

    API = "k8s.cni.cncf.io/v1alpha1"
    KIND = "IPAMClaim"
    PLURAL = "ipamclaims"
    MOST_METADATA = SMALL_METADATA

    spec: IPAMClaimSpec
    status: IPAMClaimStatus = IPAMClaimStatus()


class PodObject(Resource, frozen=True, kw_only=True):
    """A Pod, of which the metadata alone is read."""

    API = "v1"
    KIND = "Pod"
    PLURAL = "pods"


class _Selection(msgspec.Struct, frozen=True):
    """An element of the annotation, as far as it is read."""

    interface: str = ""
    old_interface: str = msgspec.field(default="", name="interfaceRequest")
    claim: str = msgspec.field(default="", name="ipam-claim-reference")


class IpamClaims:
    """Reads and fills the claims of pods. Threads may share it."""

    def __init__(self, api: ClusterApi) -> None:
        self._api = api

    def of(self, owner: Owner) -> NamedClaim | None:
        """The claim that the pod names for this interface; None if it names none. ClaimRefused."""
        pod, attachment = owner.pod, owner.attachment
        if not (pod.namespace and pod.name):
            return None
        name = _named(self._read(PodObject, pod.name, pod), attachment.ifname, pod)
        if not name:
            return None
        claim = self._read(IPAMClaim, name, pod)
        spec = claim.spec
        if (spec.network, spec.interface) != (attachment.network, attachment.ifname):
            raise ClaimRefused(
                f"IPAMClaim {pod.namespace}/{name} is for interface {spec.interface} on network "
                f"{spec.network}, and pod {pod} names it for interface {attachment.ifname} on "
                f"network {attachment.network}: nothing was reserved; name another claim in "
                f"annotation {ANNOTATION}"
            )
        asked = claim.status.ips or spec.ip_requests
        if len(asked) > ADDRESSES:  # whoever makes claims in a namespace writes them
            raise ClaimRefused(
                f"IPAMClaim {pod.namespace}/{name}: status.ips or spec.ipRequests has {len(asked)} "
                f"addresses, and at most {ADDRESSES} are read: nothing was reserved; name fewer"
            )
        try:
            addresses = tuple(parse_interface(each)[0] for each in asked)
        except ValueError as error:
            raise ClaimRefused(
                f"IPAMClaim {pod.namespace}/{name}: {error}: nothing was reserved; correct its "
                "status.ips or spec.ipRequests"
            ) from None
        return NamedClaim(pod.namespace, name, claim.metadata.uid, addresses)

    def fill(self, claim: NamedClaim, owner: Owner, grant: Grant) -> None:
        """Write what the pod got into the claim's status, unless it is there. ClaimRefused."""
        ips = tuple(
            f"{each.reservation.address}/{each.range.network.family_prefix}"
            for each in grant.granted
        )
        for _ in range(_WRITES):
            found = self._read(IPAMClaim, claim.name, owner.pod)
            if found.metadata.uid != claim.uid:
                raise ClaimRefused(f"IPAMClaim {claim} was deleted and made again: {_LATER}")
            wanted = replace(found.status, ips=ips, owner_pod=owner.pod.name)
            if wanted == found.status:
                return
            try:
                self._write(found, wanted)
            except (Conflict, NotFound):
                continue
            except ApiError as error:
                raise ClaimRefused(
                    f"the status of IPAMClaim {claim} cannot be written: {error}: {_hint(error)}"
                ) from None
            return
        raise ClaimRefused(f"IPAMClaim {claim} changes all the time: {_LATER}")

    def _write(self, found: IPAMClaim, wanted: IPAMClaimStatus) -> None:
        """Write the status; the addresses alone where the kind is of a version that has no
        ownerPod. ApiError."""
        try:
            self._api.update_status(replace(found, status=wanted))
        except Refused as error:
            if "ownerPod" not in str(error):
                raise
            self._api.update_status(replace(found, status=replace(wanted, owner_pod="")))

    def _read(self, kind: type[Any], name: str, pod: Pod) -> Any:  # noqa: ANN401 - of that kind
        try:
            found = self._api.get(kind, name, pod.namespace)
        except NotFound as error:
            why = "the pod is gone"
            if kind is IPAMClaim:
                why = (
                    f"annotation {ANNOTATION} of the pod names that IPAMClaim: make it, and the "
                    "kind before, if `kubectl get crd ipamclaims.k8s.cni.cncf.io` shows none"
                )
            raise ClaimRefused(f"{error}: nothing was reserved; {why}") from None
        except ApiError as error:
            what = f"the IPAMClaim of pod {pod} cannot be read"
            raise ClaimRefused(f"{what}: {error}: {_hint(error)}") from None
        # The object of a static pod is a copy with a uid of its own.
        is_copy = _MIRROR in found.metadata.annotations
        if kind is PodObject and pod.uid and found.metadata.uid != pod.uid and not is_copy:
            raise ClaimRefused(f"pod {pod} was deleted and made again: {_LATER}")
        return found


def _hint(error: ApiError) -> str:
    return f"nothing was reserved; {_RIGHT}" if isinstance(error, Refused) else _LATER


def _named(found: PodObject, ifname: str, pod: Pod) -> str:
    """The claim that the annotation names for the interface. ClaimRefused: it is not readable.

    Multus names an interface after the element, or "net" and the element's number.
    """
    written = found.metadata.annotations.get(ANNOTATION, "")
    if '"ipam-claim-reference"' not in written:
        return ""
    try:
        elements = decoding.decode(written, list[_Selection])
    except msgspec.MsgspecError as error:
        raise ClaimRefused(
            f"annotation {ANNOTATION} of pod {pod}: {error}: nothing was reserved"
        ) from None
    for number, element in enumerate(elements, 1):
        if (element.interface or element.old_interface or f"net{number}") == ifname:
            return element.claim
    return ""
