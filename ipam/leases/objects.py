"""The objects of ipam.podfabric.io/v1alpha1 on the API server.

docs/reference/objects.md describes every field. The API server refuses unknown fields in a write
(`fieldValidation=Strict`), so that no field of a later version is lost.
"""

from typing import Literal

import msgspec

from kube.resources import Meta, Resource

GROUP = "ipam.podfabric.io"
VERSION = "v1alpha1"

BlockState = Literal["Active", "Draining", "Reclaiming"]


class Condition(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A condition of Kubernetes. `status` is "True", "False" or "Unknown"."""

    type: str
    status: str
    reason: str
    message: str = ""
    last_transition_time: str = ""
    observed_generation: int = 0


class IpamResource(Resource, frozen=True, kw_only=True):
    API = f"{GROUP}/{VERSION}"

    metadata: Meta


class ReclaimSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The waits before a lost node's blocks are freed. Each is a Go duration such as "1h30m"."""

    node_gone_after: str = "10m"
    max_offline: str = "30m"


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One range of one network name. `network_name`, `range` and `shared` are immutable."""

    range: str
    network_name: str = ""
    shared: bool = True
    exclude: tuple[str, ...] = ()
    block_size: int = 0
    max_blocks_per_node: int = 0
    state: Literal["Active", "Draining"] = "Active"
    reclaim: ReclaimSpec = ReclaimSpec()


class BlockCounts(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The holders of the `quarantined` blocks may be dead."""

    total: int = 0
    leased: int = 0
    quarantined: int = 0


class AddressCounts(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """`capacity` is the number of addresses that pods may get, at most 2**63 - 1."""

    capacity: int = 0
    used: int = 0


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Only the controller writes the status.

    The names of the pool's blocks begin with `space`. An address is unique in its space. A
    `block_size` of 0 is undecided. A decided size changes only while no block exists. `free_map` is
    a hint, made by `block_layout.free_map`. `free_map` is "" if the pool has more than 65,536
    blocks. `held` has the addresses that whereabouts gave to pods, such as "10.0.0.8-10.0.0.15".
    Nodes lease blocks only within `offered`, or everywhere if `offered` is `None`.
    """

    space: str = ""
    block_size: int = 0
    blocks: BlockCounts = BlockCounts()
    addresses: AddressCounts = AddressCounts()
    free_map: str = ""
    held: tuple[str, ...] = ()
    offered: tuple[str, ...] | None = None
    conditions: tuple[Condition, ...] = ()


class AddressPool(IpamResource, frozen=True, kw_only=True):
    """The addresses of a range, for all networks that name the range."""

    KIND = "AddressPool"
    PLURAL = "addresspools"

    spec: PoolSpec
    status: PoolStatus = PoolStatus()


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The lessee of a block. `instance` identifies the node's store. Holders with the same
    `instance` are the same lessee. The other fields help to prove that the machine is off."""

    instance: str
    node: str
    node_uid: str = msgspec.field(default="", name="nodeUID")
    machine_id: str = msgspec.field(default="", name="machineID")
    system_uuid: str = msgspec.field(default="", name="systemUUID")
    boot: str = ""


class StickySpec(msgspec.Struct, frozen=True, kw_only=True):
    """The pod interface that gets `address`, on any node. In a block for any pod, all fields are
    "". `reservation` is the "namespace/name" of the AddressReservation."""

    reservation: str = ""
    pod: str = ""
    ifname: str = ""
    address: str = ""


class BlockSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A block is the network `range`, such as "10.64.3.64/27". `pool`, `range` and `sticky` are
    immutable.

    `epoch` grows by 1 with each new holder. If the answer to a claim is lost, `nonce` identifies
    the claim. The holder may reserve addresses for `max_offline_seconds` after a confirmation. If
    `probe` is set, a lost machine may still use the addresses. So each address is probed before its
    first use. A holder deletes no sticky block, and no block with unprobed addresses. The holder
    sets the state Draining instead, and the next holder takes the block over.
    """

    pool: str
    range: str
    sticky: StickySpec = StickySpec()
    state: BlockState = "Active"
    epoch: int = 1
    holder: Holder
    nonce: str = ""
    max_offline_seconds: int = 1800
    probe: bool = False


class BlockStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The addresses that pods have. The holder writes the status from time to time.

    `holders` maps an offset in the block to a pod interface ("66": "team-a/trainer-0 net1"). `seq`
    is the sequence number of the holder's store. No decision reads `confirmed`, because clocks of
    machines differ.
    """

    used: int = 0
    free: int = 0
    seq: int = 0
    confirmed: str = ""
    holders: dict[str, str] = {}


class AddressBlock(IpamResource, frozen=True, kw_only=True):
    """A lease of a block. The object exists while the lease lasts."""

    KIND = "AddressBlock"
    PLURAL = "addressblocks"
    MOST_METADATA = 8 << 10

    spec: BlockSpec
    status: BlockStatus = BlockStatus()

    @property
    def holder(self) -> Holder:
        return self.spec.holder

    @property
    def space(self) -> str:
        return self.metadata.name.partition(".")[0]


class OwnerReference(msgspec.Struct, frozen=True, kw_only=True):
    """A pod, or the pods of a StatefulSet. `kind` is "Pod" or "StatefulSet"."""

    kind: str
    name: str
    ifname: str = ""


class ReservationSpec(msgspec.Struct, frozen=True, kw_only=True):
    pool: str
    owner: OwnerReference


class ReservationStatus(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True
):
    """`bound_to` names the nodes that have the addresses now."""

    addresses: tuple[str, ...] = ()
    bound_to: str = ""


class AddressReservation(IpamResource, frozen=True, kw_only=True):
    """A sticky address, in the pod's namespace."""

    KIND = "AddressReservation"
    PLURAL = "addressreservations"
    MOST_METADATA = 8 << 10

    spec: ReservationSpec
    status: ReservationStatus = ReservationStatus()
