"""The five verbs of `sriov`, top to bottom in the order things happen.

What an ADD does is undone in reverse when any later step fails, or on SIGTERM; what a kill
leaves is in the journal, and the DEL that follows, a GC, a sweep, or the next ADD for the same
device undoes it from there.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from base import interrupts, locks
from base.locks import Busy
from base.paths import Paths
from cni.attachments import results
from cni.attachments.entitlement import require_allowed
from cni.attachments.entry import ATTACHED, JournalDamaged, JournalEntry
from cni.attachments.journal import Journal
from cni.attachments.matching import Match, matched, rdma_beside, require_records, tell
from cni.attachments.removal import Remover, lives
from cni.attachments.requests import (
    attached,
    attachment_of,
    begun,
    explained,
    ipam_kept,
    namespace_of,
    request_of,
    require_still_there,
    require_store,
    with_record,
)
from cni.attachments.undo import Undo
from cni.policy import rules
from cni.policy.rules import Policy
from cni.spec.attachment import Attachment
from cni.spec.entry import VERSIONS
from cni.spec.errors import CNIError, Code
from cni.spec.notes import note
from cni.spec.request import Request
from cni.spec.result import Interface, Result, require_convertible
from cni.sriov import check, devices, guids, options, restore_without_journal, settings
from cni.sriov.interface import Placed, give_addresses, place
from cni.sriov.options import SriovOptions
from cni.sriov.plan import DevicePlan, plan_of
from cni.sriov.record import DeviceRecord, record_of
from cni.sriov.removal import Devices
from host import netdev_move, pci
from host.errors import HostError
from host.namespaces import NetworkNamespace
from host.netdev_move import NameTaken
from host.netlink import Rtnetlink, netlink
from ipam.delegation import OURS, TAKEN_OVER, Delegation
from ipam.plugin import AddressPlugin


class _InUse(Exception):
    """Another attachment has the device. `settling`: a call for it is at work.

    Only the note for the administrator says which one.
    """

    def __init__(self, owner: JournalEntry, *, settling: bool) -> None:
        super().__init__(
            f"device {owner.device} is already allocated: another attachment has it since "
            f"{owner.since} (the agent's log says which): try again, or name another device"
        )
        self.owner = owner
        self.settling = settling

    def note(self) -> None:
        """Say whose it is, where the tenant does not read."""
        owner = self.owner
        whose = f"{owner.pod_namespace}/{owner.pod_name}, " if owner.pod_name else ""
        note(
            f"device {owner.device} is allocated to {whose}container {owner.container_id}, "
            f'interface "{owner.ifname}" of network "{owner.network}", since {owner.since}'
        )


class Sriov:
    """The plugin on one node, whose files are where `paths` says."""

    versions: Sequence[str] = VERSIONS

    def __init__(
        self,
        paths: Paths,
        addresses: AddressPlugin | None = None,
        policy: rules.Source | None = None,
    ) -> None:
        self._paths = paths
        self._policy = policy or rules.on_node(paths.config)
        self._addresses = addresses or AddressPlugin.on_node(
            paths.ipam, paths.boot_id, self._policy
        )
        self._ipam = Delegation(self._addresses, paths.cni_bin, self._policy)
        self._journal = Journal(paths)
        self._devices = Devices(self._journal, paths)
        self._remover = Remover(self._devices, self._journal, paths, self._ipam.of_removal)

    def add(self, request: Request) -> dict[str, Any]:
        """Give the pod a VF with its RDMA device, and addresses if an IPAM plugin is named."""
        wanted = options.read(request)
        policy = self._policy()
        _require_allowed(policy, wanted)
        ipam = self._ipam.of(request)
        require_convertible(request.cni_version, has_addresses=bool(wanted.ipam_type))
        results.previous_document(request)
        attachment = attachment_of(request)
        with explained(), self._journal.locked(attachment), ExitStack() as opened:
            namespace = opened.enter_context(namespace_of(request))
            host = opened.enter_context(netlink())
            pod = opened.enter_context(netlink(namespace))

            self._remover.settle_earlier_attempt(attachment, request)
            _refuse_taken_name(pod, request)
            if wanted.ipam_type in (OURS, TAKEN_OVER):
                require_store(self._journal, self._paths)
            with Undo() as undo:
                undo.last(lambda: self._journal.remove(attachment))
                entry, record, plan = self._choose(request, wanted, namespace, host, policy)
                answer = Result()
                needs_interface = wanted.ipam_type == "dhcp"
                if ipam is not None and not needs_interface:
                    undo.register("the addresses", ipam.undo)
                    answer = ipam.add(record.segment)
                # Its path may be gone by then, while the descriptor keeps it and the device alive.
                inside = msgspec.structs.replace(request, netns_descriptor=namespace.descriptor)
                undo.register(
                    "the device", lambda: self._devices.take_back(attachment, inside, entry)
                )
                self._apply_settings(host, record)
                if guids.needs_binding(plan.link, record):
                    plan, record = guids.rebind(host, self._paths, plan, record)
                    entry = with_record(entry, record)
                    self._journal.write(entry)
                placed = place(host, pod, namespace, self._paths, attachment, plan, record, answer)
                if ipam is not None and needs_interface:
                    undo.register("the addresses", ipam.undo)
                    answer = ipam.add(record.segment)
                    if plan.link is not None:
                        give_addresses(pod, namespace, request.ifname, answer)
                require_still_there(namespace)
                interface = self._interface(request, placed, plan)
                tell(self._paths, request, interface)
                document = results.document(request, interface, answer, wanted.dns)
                interrupts.hold()  # what is attached now is answered as attached
                addresses = [ip.address for ip in answer.ips]
                self._journal.write(attached(entry, record, addresses))
        return document

    def delete(self, request: Request) -> None:
        """Give the device back as it was and release the addresses, whatever of them is left."""
        attachment = attachment_of(request)
        with explained(), self._journal.locked(attachment):
            self._remover.remove(attachment, request)

    def check(self, request: Request) -> None:
        """Compare everything that was set with what the kernel shows, and ask the IPAM plugin."""
        options.read(request)
        attachment = attachment_of(request)
        with explained(), self._journal.locked(attachment):
            check.check(self._journal, self._paths, attachment, request)
            added = ipam_kept(self._journal, attachment)
            ipam = self._ipam.of(request, added=added)
            if ipam is not None:
                ipam.check()

    def gc(self, request: Request) -> None:
        """Remove the attachments of this network that the runtime does not list."""
        with explained():
            self._remover.collect(request)

    def sweep(self) -> list[str]:
        """Remove what belongs to no living sandbox (after a reboot, a kill); says what it did."""
        with explained():
            return self._remover.sweep()

    def status(self, request: Request) -> None:
        """Whether an ADD could succeed now: PFs with VFs, RDMA's mode, and the IPAM plugin."""
        try:
            wanted = options.read(request, needs_device=False)
            _require_allowed(self._policy(), wanted)
            require_records(self._paths)
            ipam = self._ipam.of(request)
            with explained(), netlink() as host:
                missing = devices.missing(host, self._paths, wanted)
        except CNIError as error:
            raise CNIError(Code.UNAVAILABLE, error.message, error.details) from None
        if missing:
            raise CNIError(Code.UNAVAILABLE, "; ".join(missing))
        with explained():
            if ipam is not None:
                ipam.status()

    def _choose(
        self,
        request: Request,
        wanted: SriovOptions,
        namespace: NetworkNamespace,
        host: Rtnetlink,
        policy: Policy,
    ) -> tuple[JournalEntry, DeviceRecord, DevicePlan]:
        """Claim a device, of those that the pod was given if it was given any."""
        match = matched(
            self._paths,
            request,
            wanted.pod,
            needed=not wanted.device and not wanted.masters,
            wanted=wanted.match_device,
            policy=policy,
        )
        return self._claim(request, wanted, namespace, host, match)

    def _claim(
        self,
        request: Request,
        wanted: SriovOptions,
        namespace: NetworkNamespace,
        host: Rtnetlink,
        match: Match,
    ) -> tuple[JournalEntry, DeviceRecord, DevicePlan]:
        """Choose a device and write down that it is this attachment's. Nothing else is changed.

        A device whose owner is dead is made what it was first. One whose owner is being removed
        is waited for, if no other will do; other attachments of the pod choose meanwhile.
        """
        deadline = time.monotonic() + locks.TIMEOUT
        pause = 0.05
        while True:
            refusals: list[CNIError] = []
            owners: dict[Attachment, _InUse] = {}
            settling = False
            with match.choosing():
                for address in devices.candidates(self._paths, wanted, match):
                    try:
                        devices.require_entitled(self._paths, address, wanted, match)
                        return self._claim_one(address, request, wanted, namespace, host, match)
                    except _InUse as in_use:
                        settling = settling or in_use.settling
                        owners[in_use.owner.attachment] = in_use
                        refusals.append(CNIError(Code.TRY_AGAIN, str(in_use)))
                    except Busy as busy:
                        settling = True
                        refusals.append(CNIError(Code.TRY_AGAIN, str(busy)))
                    except HostError as error:
                        refusals.append(CNIError(Code.KERNEL, str(error)))
                    except CNIError as refusal:
                        refusals.append(refusal)
            if not settling or time.monotonic() >= deadline:
                for taken in owners.values():
                    taken.note()
                raise _joined(refusals)
            interrupts.checkpoint()
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    def _claim_one(
        self,
        address: str,
        request: Request,
        wanted: SriovOptions,
        namespace: NetworkNamespace,
        host: Rtnetlink,
        match: Match,
    ) -> tuple[JournalEntry, DeviceRecord, DevicePlan]:
        with self._journal.device_locked(address, timeout=0.0):
            self._evict_the_dead(address)
            if wanted.device or wanted.device_id:
                restore_without_journal.bring_home(host, self._paths, address)
            plan = plan_of(host, self._paths, address, wanted)
            devices.require_match(self._paths, plan.function, wanted, match)
            record = record_of(plan, wanted)
            boot_id = self._paths.boot_id()
            entry = begun("sriov", request, namespace, boot_id, record, wanted.pod, address)
            self._journal.write(entry)
            match.take(devices.hca_of(self._paths, plan.function, match))
        return entry, record, plan

    def _evict_the_dead(self, address: str) -> None:
        """Take the device back from attachments whose sandbox is gone. Raises _InUse, CNIError."""
        for owner in self._journal.holders(address):
            if isinstance(owner, JournalDamaged):
                note(f"{owner}, and it names device {address}: run DEL for its attachment")
                raise CNIError(
                    Code.JOURNAL_DAMAGED,
                    f"device {address} may be another attachment's, whose journal file is damaged: "
                    "the agent's log names the file; run DEL for its attachment",
                )
            try:
                with self._journal.locked(owner.attachment, timeout=0.0):
                    self._evict(owner)
            except Busy:
                raise _InUse(owner, settling=True) from None

    def _evict(self, owner: JournalEntry) -> None:
        try:
            unchanged = self._journal.read(owner.attachment) == owner
        except JournalDamaged:
            unchanged = False
        if not unchanged:
            raise _InUse(owner, settling=True)  # somebody was faster: look again
        boot_id = self._paths.boot_id()
        if owner.phase == ATTACHED and lives(owner, boot_id):
            raise _InUse(owner, settling=False)
        note(f"device {owner.device} is taken back from {owner.attachment}, whose sandbox is gone")
        if owner.boot_id == boot_id:
            try:
                self._devices.take_back_locked(owner.attachment, request_of(owner), owner)
            except HostError as error:
                note(f"{owner.attachment}: {error}")
                raise HostError(
                    f"device {owner.device} cannot be taken back from an attachment whose sandbox "
                    "is gone (the agent's log says which, and why): try again later"
                ) from None
        else:  # no kernel state outlives a boot
            self._journal.write(msgspec.structs.replace(owner, device=""))

    def _interface(self, request: Request, placed: Placed, plan: DevicePlan) -> Interface:
        names = pci.rdma_of(self._paths, plan.function.address) or plan.function.rdma
        rdma, uverbs = rdma_beside(self._paths, names)
        return Interface(
            name=request.ifname,
            mac=placed.mac,
            mtu=placed.mtu,
            sandbox=request.netns,
            pciID=placed.bdf,
            rdmaDevice=rdma,
            uverbs=uverbs,
        )

    def _apply_settings(self, host: Rtnetlink, record: DeviceRecord) -> None:
        if record.before is not None and record.applied not in (None, record.before):
            function = pci.find(self._paths, record.device)
            if function is None or function.index != record.before.index:
                raise CNIError(
                    Code.TRY_AGAIN, f"the VFs of {record.pf} were made anew meanwhile: try again"
                )
            with settings.pf_of(self._paths, host, record.pf) as pf:
                settings.apply(host, pf, record.before, record.applied)


def _require_allowed(policy: Policy, wanted: SriovOptions) -> None:
    require_allowed(policy, match_device=wanted.match_device, pf_only=wanted.pf_only)


def _joined(refusals: list[CNIError]) -> CNIError:
    """One error for all candidates; that it may pass, if it may for one of them."""
    if len(refusals) == 1:
        return refusals[0]
    codes = [refusal.code for refusal in refusals]
    code = Code.TRY_AGAIN if Code.TRY_AGAIN in codes else codes[0]
    return CNIError(code, "; ".join(dict.fromkeys(refusal.message for refusal in refusals)))


def _refuse_taken_name(pod: Rtnetlink, request: Request) -> None:
    try:
        netdev_move.require_free(pod, request.ifname)
    except NameTaken as taken:
        raise CNIError(
            Code.INVALID_CONFIG, f"{taken}: give this attachment another interface name"
        ) from None
