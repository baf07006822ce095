"""The terms of the store: owners, reservations, grants, and the errors about them."""

from collections.abc import Mapping, Sequence

import msgspec

from base.pod import Pod
from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError, Code
from ipam.ranges import Range

UNNAMED = " imported"
"""The network of reservations from a store without network names. Real names have no leading
space. Container and interface identify the attachment."""


def unnamed(attachment: Attachment) -> Attachment:
    """The attachment under which an import without network names reserved its addresses."""
    return Attachment(UNNAMED, attachment.container_id, attachment.ifname)


class Quota(msgspec.Struct, frozen=True):
    """How many addresses a pod and its namespace may have on this node. `None` means any number."""

    of_pod: int | None = None
    of_namespace: int | None = None
    rules: tuple[str, ...] = ()


class Owner(msgspec.Struct, frozen=True):
    """An attachment, its pod (by the names that the runtime sent), and the pod's quota."""

    attachment: Attachment
    pod: Pod = Pod()
    quota: Quota | None = None


class Reservation(msgspec.Struct, frozen=True):
    """An address held by an attachment. The fields are in the order of the columns.

    The address is unique in its `domain`. `range` is the network of its range (CIDR). It was
    reserved in the boot `boot`, at the time `since` (seconds since 1970). `segment` is the link on
    which it is used, "" if unknown. All hosts on one segment can reach each other.
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
        """The holder for an error: the attachment, and the pod if it is known."""
        pod = f"pod {self.pod_name}, " if self.pod else ""
        return f"{pod}{self.attachment}"

    @property
    def pod_name(self) -> str:
        """`namespace/name`, or the part that the runtime sent."""
        return f"{self.namespace}/{self.pod}" if self.namespace else self.pod

    def is_of(self, pod: Pod) -> bool:
        """Whether the pod holds the reservation: by uid if both have a uid, else by namespace and
        name."""
        if self.uid and pod.uid:
            return self.uid == pod.uid
        # A name without a namespace identifies no pod: podman and bare CNI_ARGS may send one.
        named = pod.namespace != "" and pod.name != ""
        return named and (self.namespace, self.pod) == (pod.namespace, pod.name)


class AddressTaken(CNIError):
    """A requested address is in use. The caller sees the message. Only the operator sees
    `holder`, because it may be another tenant's pod."""

    def __init__(self, message: str, holder: str = "") -> None:
        super().__init__(Code.ADDRESS_TAKEN, message)
        self.holder = holder


class AddressInUse(CNIError):
    """Another machine on the link has addresses that a pod was about to get.

    `answers` maps each such address to the hardware address of the machine that answered.
    """

    def __init__(self, answers: Mapping[str, str]) -> None:
        listed = ", ".join(f"{address} ({who})" for address, who in answers.items())
        super().__init__(
            Code.TRY_AGAIN,
            f"another machine on the link already has {listed}: the next try uses another "
            "address; find that machine by its hardware address: it may be a lost node that still "
            "runs; if it is not a node of the cluster, exclude the address",
        )


class AddressUnprobed(CNIError):
    """An interface gets an address without a probe, although another machine may use it."""

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
    """The result of one `reserve`, in the order of its range sets. `undo` needs only this.
    Addresses in `unprobed` must be probed before they are set."""

    granted: tuple[ReservedAddress, ...] = ()
    unprobed: tuple[str, ...] = ()


class RangeUsage(msgspec.Struct, frozen=True):
    """How many addresses of a range are held and free. `used` counts all held addresses of its
    `domain`, including those of earlier boots."""

    domain: str
    range: str
    used: int
    free: int
