"""Who holds which address: the words, and what every store of reservations can do.

The store of one node is `sqlite_store`. A store that is shared by a cluster comes behind the
same interface.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from base.pod import Pod
from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError, Code
from ipam.ranges import Range, RangeSet


class Quota(msgspec.Struct, frozen=True):
    """How many addresses a pod and its namespace may have on this node, by rules of the policy.

    None is without a limit.
    """

    of_pod: int | None = None
    of_namespace: int | None = None
    rules: tuple[str, ...] = ()


class Owner(msgspec.Struct, frozen=True):
    """An attachment, and the pod it is made for as far as the runtime named it.

    `quota` is that of the pod and its namespace; None without a limit.
    """

    attachment: Attachment
    pod: Pod = Pod()
    quota: Quota | None = None


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """An address held by an attachment: a row of the store, and an entry of `list`.

    `domain` is where the address is unique, `range` the network it was taken from (CIDR),
    `boot` the boot in which it was taken, `since` seconds since 1970. `segment` is the link that
    it is used on, "" if that is unknown: all on the same segment can hear each other.
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
        """The holder as the runtime knows it."""
        return Attachment(self.network, self.container_id, self.ifname)

    @property
    def holder(self) -> str:
        """The holder in an error: the pod where it is known, and always the attachment."""
        pod = f"pod {self.pod_name}, " if self.pod else ""
        return f"{pod}{self.attachment}"

    @property
    def pod_name(self) -> str:
        """`namespace/name`, or as much of it as the runtime said."""
        return f"{self.namespace}/{self.pod}" if self.namespace else self.pod

    def held_by_pod_of(self, owner: Owner) -> bool:
        """Whether `owner` is this reservation's pod again, for the same network and ifname.

        By uid if both have one, else by namespace and name.
        """
        attachment = owner.attachment
        same = (self.network, self.ifname) == (attachment.network, attachment.ifname)
        return same and self.is_of(owner.pod)

    def is_of(self, pod: Pod) -> bool:
        """Whether the pod holds it. By uid if both have one, else by namespace and name."""
        if self.uid and pod.uid:
            return self.uid == pod.uid
        # A name alone does not identify a pod: podman and bare CNI_ARGS send one for everything.
        named = pod.namespace != "" and pod.name != ""
        return named and (self.namespace, self.pod) == (pod.namespace, pod.name)


class AddressTaken(CNIError):
    """A requested address is in use. The text is for the caller.

    `holder` is for the operator alone: it may be another tenant's pod.
    """

    def __init__(self, message: str, holder: str = "") -> None:
        super().__init__(Code.ADDRESS_TAKEN, message)
        self.holder = holder


class AddressInUse(CNIError):
    """Another machine on the link has addresses that were about to be set. `answers` gives its
    hardware address for each."""

    def __init__(self, answers: Mapping[str, str]) -> None:
        listed = ", ".join(f"{address} ({who})" for address, who in answers.items())
        super().__init__(
            Code.TRY_AGAIN,
            f"another machine on the link already has {listed}: no pod gets that: the next try "
            "takes another address; find that machine by its hardware address: its node may be "
            "lost and still run, or it is none of the cluster's: then exclude the address",
        )


class AddressUnprobed(CNIError):
    """An address is set although another machine may use it: nothing could probe it."""

    def __init__(self, addresses: Sequence[str], why: str) -> None:
        super().__init__(
            Code.TRY_AGAIN,
            f"{', '.join(addresses)} may be used by another machine, and was not probed: {why}",
        )


class ReservedAddress(msgspec.Struct, frozen=True):
    """An address that `reserve` gave out, its range, and the reservation that it replaced."""

    range: Range
    reservation: Reservation
    replaced: Reservation | None = None


class Grant(msgspec.Struct, frozen=True):
    """What one `reserve` did, in the order of its range sets: all that `undo` needs.

    Another machine may use the addresses in `unprobed`: they are probed before they are set.
    """

    granted: tuple[ReservedAddress, ...] = ()
    unprobed: tuple[str, ...] = ()


class RangeUsage(msgspec.Struct, frozen=True):
    """How full a range is, of the addresses that it may hand out.

    `used` counts those that are held, from this range or from one that shares its `domain`, also
    since an earlier boot.
    """

    domain: str
    range: str
    used: int
    free: int


class Usage(msgspec.Struct, frozen=True):
    """How full ranges are. `state` identifies the store's content, `asked` the ranges asked for."""

    state: str = ""
    asked: tuple[Range, ...] = ()
    ranges: tuple[RangeUsage, ...] = ()


class Store(Protocol):
    """Reservations. Every method is one transaction; CNIError is what it raises.

    Codes: 5 if the system refuses, 11 if the lock is not free in time, 112 if the store is damaged,
    which is left as it is.
    """

    def reserve(
        self,
        owner: Owner,
        sets: Sequence[RangeSet],
        *,
        segment: str = "",
        alone: Sequence[Range] = (),
    ) -> Grant:
        """One address of each set for `owner`, to be used on `segment`: all or none.

        None of them is one that another domain holds on the same segment, if that is known.
        Raises CNIError 103 if the attachment holds addresses already, 110 if a set has no free
        address, AddressTaken if a fixed address is held by someone else, and 121 if another
        network holds an address on the segment that is in a range of `alone`, or if the owner's
        quota does not allow as many.
        """

    def undo(self, grant: Grant) -> None:
        """Undo one `reserve`: put back what it replaced, and leave what has changed since."""

    def release(self, attachment: Attachment) -> list[Reservation]:
        """Free everything that the attachment holds, and return it."""

    def collect(self, network: str, valid: Collection[tuple[str, str]]) -> list[Reservation]:
        """Free what attachments of `network` hold whose (container id, ifname) is not valid."""

    def release_stale(self) -> list[Reservation]:
        """Free and return reservations of an earlier boot for a link of this node."""

    def held_by(self, attachment: Attachment) -> list[Reservation]:
        """Everything that the attachment holds, lowest address first."""

    def exhausted(self, sets: Sequence[RangeSet]) -> str | None:
        """Why `reserve` of these sets would fail for a new owner; None if it would not."""

    def usage(self, asked: tuple[Range, ...], last: Usage) -> Usage:
        """How full these ranges are, and as whole networks others that reservations are from.

        `last` is an earlier answer, which is returned at no cost if nothing has changed.
        """

    def reservations(self) -> list[Reservation]:
        """Everything, by domain and address."""
