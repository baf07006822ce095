"""The plugin `sriov`: the steps of each verb, in order.

After a failure or SIGTERM, an ADD undoes its steps in reverse order. If the process is killed, the
steps are undone from the journal: by the next DEL, GC or sweep, or by an ADD for the same device.
"""

from typing import Any, ClassVar

import msgspec

from cni.attachments import job_partition, results
from cni.attachments.journal import JournalEntry
from cni.attachments.lifecycle import Undo
from cni.attachments.matching import Match, matched, require_records
from cni.attachments.rail_plugin import Complete, RailPlugin
from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError, Code
from cni.spec.request import Request
from cni.spec.result import Result
from cni.sriov import (
    candidates,
    guids,
    interface,
    options,
    sriov_cni,
    vf_policy,
    vf_release,
    vf_settings,
)
from cni.sriov.claim import Claimer
from cni.sriov.device_record import DeviceRecord
from cni.sriov.interface import Placed, give_addresses, place
from cni.sriov.options import SriovOptions
from cni.sriov.plan import DevicePlan
from host.netlink.sockets import Rtnetlink
from host.sysfs import pci
from policy.allowance import Allowance


class Sriov(RailPlugin):
    name: ClassVar = "sriov"

    def attach(self, request: Request, complete: Complete) -> dict[str, Any]:
        """Give the pod a VF with its RDMA device, and addresses if an IPAM plugin is named."""
        wanted = options.read(request)
        allowance = vf_policy.by_options(wanted, self._allowance(request))
        ipam, allowance = self._ipam_of_add(request, allowance)
        attachment = Attachment.of(request)
        with self._attaching(attachment, request) as sandbox, Undo() as undo:
            namespace, host, pod = sandbox.namespace, sandbox.host, sandbox.pod
            undo.last(lambda: self.journal.remove(attachment))
            match = self._match(request, wanted, allowance)
            claimer = Claimer(self.journal, self.paths, request, namespace, host, match)
            entry, record, plan, wanted, allowance = claimer.claim(wanted)
            answer = Result()
            needs_interface = wanted.ipam_type == "dhcp"
            needs_binding = guids.needs_binding(plan.link, record)
            if not needs_binding:
                allowance = vf_policy.in_partition(plan, allowance)
            if ipam is not None and not needs_interface:
                undo.register("the addresses", ipam.undo)
                if not needs_binding:
                    answer = ipam.add(record.segment, allowance)
            # At the undo the path may be gone. The descriptor keeps the namespace and the device.
            inside = msgspec.structs.replace(request, netns_descriptor=namespace.descriptor)
            undo.register("the device", lambda: self.detach(attachment, inside, entry))
            self._apply_settings(host, record)
            if needs_binding:
                plan, record = guids.rebind(host, self.paths, plan, record)
                entry = entry.with_record(record)
                self.journal.write(entry)
                allowance = vf_policy.in_partition(plan, allowance)
                if ipam is not None:  # not earlier, because the GUID decides the partition
                    answer = ipam.add(record.segment, allowance)
            guids.note_other_partition(plan, wanted.pkey)
            placed = place(
                *(host, pod, namespace, self.paths, attachment, plan, record, answer, ipam),
                accept_ra=wanted.accept_ra,
            )
            answer = placed.answer
            if ipam is not None and needs_interface:
                undo.register("the addresses", ipam.undo)
                answer = ipam.add(record.segment, allowance)
                if plan.link is not None:
                    accept_ra = wanted.accept_ra
                    give_addresses(pod, namespace, request.ifname, answer, accept_ra=accept_ra)
            sandbox.require_still_there()
            document = self._document(request, placed, plan, answer, wanted)
            job_partition.write(self.paths, self.journal, match.holdings, request.container_id)
            complete(entry.attached(record, answer.cidrs, record.segment))
        return document

    def detach(self, attachment: Attachment, request: Request, entry: JournalEntry | None) -> None:
        """Restore the device if the attachment still has one. Raises HostError, Busy."""
        vf_release.release(self.journal, self.paths, attachment, request, entry)
        if entry is not None:
            sriov_cni.forget(self.paths, attachment, entry.device)

    def adopt(self, attachment: Attachment, request: Request) -> JournalEntry | None:
        """Write an attachment's journal entry from a file of sriov-cni or ib-sriov-cni."""
        return sriov_cni.adopt(self.journal, self.paths, attachment, request)

    def compare(self, attachment: Attachment, request: Request) -> None:
        """Raise CNIError 102 if the device differs from the record or prevResult."""
        options.read(request)
        interface.check(self.journal, self.paths, attachment, request)

    def require_ready(self, request: Request) -> None:
        """Raise CNIError if an ADD would fail on this node now."""
        wanted = options.read(request, needs_device=False)
        self._require_possible(match_device=wanted.match_device, pf_only=wanted.pf_only)
        require_records(self.paths)
        if missing := candidates.missing(self.paths, wanted):
            raise CNIError(Code.UNAVAILABLE, "; ".join(missing))

    def _match(self, request: Request, wanted: SriovOptions, allowance: Allowance) -> Match:
        return matched(
            self.paths,
            request,
            wanted.pod,
            needed=not wanted.device and not wanted.masters,
            match_device=wanted.match_device,
            allowance=allowance,
        )

    def _apply_settings(self, host: Rtnetlink, record: DeviceRecord) -> None:
        """Set the configuration's VF settings at the PF."""
        if record.before is None or record.applied in (None, record.before):
            return
        if pci.place_of_vf(self.paths, record.device) != (record.pf, record.before.index):
            raise CNIError(
                Code.TRY_AGAIN, f"the VFs of PF {record.pf} changed during this call: try again"
            )
        with vf_settings.pf_of(self.paths, host, record.pf) as pf:
            vf_settings.apply(host, pf, record.before, record.applied)

    def _document(
        self,
        request: Request,
        placed: Placed,
        plan: DevicePlan,
        answer: Result,
        wanted: SriovOptions,
    ) -> dict[str, Any]:
        names = candidates.rdma_devices_of(self.paths, plan.function)
        shown = results.interface_of(
            self.paths, request, mac=placed.mac, mtu=placed.mtu, bdf=placed.bdf, rdma=names
        )
        return results.document(request, shown, answer, wanted.dns)
