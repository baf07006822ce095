"""Owners, reservations, grants, and errors about them."""

from collections.abc import Mapping, Sequence

import msgspec

from base.pod import Pod
from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError, Code
from ipam.ranges import Range

UNNAMED = " imported"
"""The network of imported reservations without a network name. Real names have no leading space."""


def unnamed(attachment: Attachment) -> Attachment:
    """The attachment of imported reservations that name no network."""
    return Attachment(UNNAMED, attachment.container_id, attachment.ifname)


class Quota(msgspec.Struct, frozen=True):
    """How many addresses a pod and its namespace may have on this node. `None` means any number."""

    of_pod: int | None = None
    of_namespace: int | None = None
    rules: tuple[str, ...] = ()


class Owner(msgspec.Struct, frozen=True):
    """`pod` has the names that the runtime sent."""

    attachment: Attachment
    pod: Pod = Pod()
    quota: Quota | None = None


class Reservation(msgspec.Struct, frozen=True):
    """An address that an attachment holds. The fields are in the order of the columns.

    The address is unique in its `domain`. `range` is the network of the range (CIDR). `since` is in
    seconds since 1970. `segment` is the link of the address, or "" if unknown. All hosts on one
    segment can reach each other.
    """

    domain: str
    address: str
    range: str
    network: str
    container_id: str
    ifname: str
    namespace: str = ""
    pod: str = ""
    uid: str = ""
    boot: str = ""
    since: int = 0
    segment: str = ""

    @property
    def attachment(self) -> Attachment:
        return Attachment(self.network, self.container_id, self.ifname)

    @property
    def holder(self) -> str:
        """The attachment, and the pod if it is known."""
        pod = f"pod {self.pod_name}, " if self.pod else ""
        return f"{pod}{self.attachment}"

    @property
    def pod_name(self) -> str:
        """`namespace/name`, or the part that the runtime sent."""
        return f"{self.namespace}/{self.pod}" if self.namespace else self.pod

    def is_of(self, pod: Pod) -> bool:
        """Whether the pod holds the reservation. Compares names only if a uid is missing."""
        if self.uid and pod.uid:
            return self.uid == pod.uid
        # A name without a namespace identifies no pod: podman and bare CNI_ARGS may send one.
        named = pod.namespace != "" and pod.name != ""
        return named and (self.namespace, self.pod) == (pod.namespace, pod.name)


class AddressTaken(CNIError):
    """Only the operator sees `holder`, because it may be another tenant's pod."""

    def __init__(self, message: str, holder: str = "") -> None:
        super().__init__(Code.ADDRESS_TAKEN, message)
        self.holder = holder


class AddressInUse(CNIError):
    """Another machine on the link has addresses that a pod was about to get. `answers` maps these
    addresses to the hardware addresses of the machines."""

    def __init__(self, answers: Mapping[str, str]) -> None:
        listed = ", ".join(f"{address} ({who})" for address, who in answers.items())
        super().__init__(
            Code.TRY_AGAIN,
            f"another machine on the link already has {listed}: the next try uses another "
            "address; find that machine by its hardware address: it may be a lost node that still "
            "runs; if it is not a node of the cluster, exclude the address",
        )


class AddressUnprobed(CNIError):
    """An interface gets an unprobed address that another machine may use."""

    def __init__(self, addresses: Sequence[str], why: str) -> None:
        super().__init__(
            Code.TRY_AGAIN,
            f"another machine may use {', '.join(addresses)}, but there was no probe: {why}",
        )


class ReservedAddress(msgspec.Struct, frozen=True):
    """A newly reserved address, its range, and the reservation that it replaced."""

    range: Range
    reservation: Reservation
    replaced: Reservation | None = None


class Grant(msgspec.Struct, frozen=True):
    """The result of one `reserve`, in the order of its sets. Addresses in `unprobed` must be probed
    before they are set."""

    granted: tuple[ReservedAddress, ...] = ()
    unprobed: tuple[str, ...] = ()


class RangeUsage(msgspec.Struct, frozen=True):
    """`used` includes the addresses of earlier boots."""

    domain: str
    range: str
    used: int
    free: int
