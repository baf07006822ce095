"""Chooses a device, and records in the journal that this attachment has the device.

If a dead attachment has the device, the device is released first.
"""

import time
from typing import NamedTuple

import msgspec

from base import interrupts, locks
from base.locks import Busy
from base.loop import Backoff
from base.paths import Paths
from cni.attachments.journal import Journal, JournalDamaged, JournalEntry, Phase
from cni.attachments.matching import Match
from cni.attachments.sandbox import lives
from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError, Code
from cni.spec.notes import note
from cni.spec.request import Request
from cni.sriov import candidates, unrecorded, vf_policy, vf_release
from cni.sriov.device_record import DeviceRecord, record_of
from cni.sriov.options import SriovOptions
from cni.sriov.plan import DevicePlan, plan_of
from host import ethtool
from host.errors import HostError
from host.namespaces import NetworkNamespace
from host.netlink.sockets import Rtnetlink
from host.sysfs import pci
from policy.allowance import Allowance, joined


class ClaimedDevice(NamedTuple):
    entry: JournalEntry
    record: DeviceRecord
    plan: DevicePlan
    wanted: SriovOptions  # with the values that rules fix
    allowance: Allowance  # of the attachment, for its addresses


class _InUse(Exception):
    """Another attachment has the device. `settling`: a call for that attachment is running.

    Tenants can read the error's text, so only the log names the other attachment.
    """

    def __init__(self, owner: JournalEntry, *, settling: bool) -> None:
        super().__init__(
            f"device {owner.device} is already allocated: another attachment has had it since "
            f"{owner.since}, and the agent's log names that attachment: try again, or name another "
            "device"
        )
        self.owner = owner
        self.settling = settling

    def note(self) -> None:
        """Write the name of the other attachment to the log."""
        owner = self.owner
        pod = f"{owner.pod_namespace}/{owner.pod_name}, " if owner.pod_name else ""
        note(
            f"device {owner.device} is allocated to {pod}container {owner.container_id}, "
            f'interface "{owner.ifname}" of network "{owner.network}", since {owner.since}'
        )


class Claimer(NamedTuple):
    """Claims a device for one ADD."""

    journal: Journal
    paths: Paths
    request: Request
    namespace: NetworkNamespace
    host: Rtnetlink
    match: Match

    def claim(self, wanted: SriovOptions) -> ClaimedDevice:
        """Claim the first candidate that fits. Raises CNIError with the reasons if none fits.

        While another call works on a candidate, wait and try again. The wait does not hold the
        pod's lock, so other attachments of the pod can choose their devices.
        """
        deadline = time.monotonic() + locks.TIMEOUT
        backoff = Backoff(0.05, 1.0)
        while True:
            refusals: list[CNIError] = []
            owners: dict[Attachment, _InUse] = {}
            settling = False
            with self.match.choosing():
                for address in candidates.candidates(self.paths, wanted, self.match):
                    try:
                        candidates.require_entitled(self.paths, address, wanted, self.match)
                        return self._claim(address, wanted)
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
                for refused in owners.values():
                    refused.note()
                raise joined(refusals)
            interrupts.checkpoint()
            with interrupts.waiting():
                time.sleep(backoff.pause())

    def _claim(self, address: str, wanted: SriovOptions) -> ClaimedDevice:
        with self.journal.device_locked(address, timeout=0.0):
            self._release_from_the_dead(address)
            if wanted.device or wanted.device_id:
                unrecorded.fetch_from_dead_pod(self.host, self.paths, address)
            wanted, plan, allowance = self._planned(address, wanted)
            candidates.require_match(self.paths, plan.function, wanted, self.match)
            record = record_of(plan, wanted)
            if plan.link is not None:
                driver_settings = ethtool.settings(self.host, plan.link.name)
                record = msgspec.structs.replace(record, ethtool=driver_settings)
            boot_id = self.paths.boot_id()
            entry = JournalEntry.begun(
                "sriov", self.request, self.namespace, boot_id, record, wanted.pod, address
            )
            self.journal.write(entry)
            self.match.take(address)
        return ClaimedDevice(entry, record, plan, wanted, allowance)

    def _planned(
        self, address: str, wanted: SriovOptions
    ) -> tuple[SriovOptions, DevicePlan, Allowance]:
        """The options (with rules' values for missing keys), the plan and the allowance."""
        function = pci.find(self.paths, address)
        if function is None:
            return wanted, plan_of(self.host, self.paths, address, wanted), self.match.allowance
        infiniband = candidates.is_infiniband(self.host, self.paths, function)
        allowance = self.match.using(address, wanted.device_key or "master", address)
        plan = plan_of(self.host, self.paths, address, wanted)
        filled, allowance = vf_policy.completed(
            self.request, wanted, allowance, function, infiniband=infiniband
        )
        if filled is not wanted:
            plan = plan_of(self.host, self.paths, address, filled)
        return filled, plan, vf_policy.as_planned(plan, filled, allowance, infiniband=infiniband)

    def _release_from_the_dead(self, address: str) -> None:
        """Release the device if its attachment's sandbox is gone. Raises _InUse, CNIError."""
        for owner in self.journal.holders(address):
            if isinstance(owner, JournalDamaged):
                note(f"{owner}; the file is for device {address}: run DEL for its attachment")
                raise CNIError(
                    Code.JOURNAL_DAMAGED,
                    f"device {address} may belong to an attachment with a damaged journal "
                    "file: run DEL for that attachment (the agent's log names the file)",
                )
            try:
                with self.journal.locked(owner.first, timeout=0.0):
                    self._release_if_dead(owner)
            except Busy:
                raise _InUse(owner, settling=True) from None

    def _release_if_dead(self, owner: JournalEntry) -> None:
        try:
            unchanged = self.journal.read(owner.attachment) == owner
        except JournalDamaged:
            unchanged = False
        if not unchanged:
            raise _InUse(owner, settling=True)  # another call changed the entry: look again
        boot_id = self.paths.boot_id()
        if owner.phase is Phase.ATTACHED and lives(owner, boot_id):
            raise _InUse(owner, settling=False)
        note(f"device {owner.device} is released from {owner.attachment}, whose sandbox is gone")
        if owner.boot_id != boot_id:  # no kernel state outlives a boot
            self.journal.release_device(owner)
            return
        try:
            request = owner.delete_request()
            vf_release.release_locked(
                self.journal, self.paths, owner.attachment, request, owner, owner.device
            )
        except HostError as error:
            note(f"{owner.attachment}: {error}")
            raise HostError(
                f"device {owner.device} of a deleted pod cannot be released: try again later; "
                "the agent's log has the reason"
            ) from None
