"""The plugin `ipoib`: the steps of each verb, in order.

After a failure or SIGTERM, an ADD undoes its steps in reverse order. If the process is killed, the
next DEL, GC or sweep reads the journal and undoes the steps.
"""

from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, ClassVar

import msgspec

from base.interrupts import wait_until
from cni.attachments import job_partition, probing, results
from cni.attachments.journal import JournalDamaged, JournalEntry
from cni.attachments.lifecycle import Sandbox, Undo
from cni.attachments.matching import matched, require_records
from cni.attachments.rail_plugin import Complete, RailPlugin
from cni.attachments.sandbox import await_return, namespaces_of
from cni.ipoib import child, options, parents
from cni.ipoib.child import ChildRecord
from cni.ipoib.options import IpoibOptions
from cni.ipoib.parents import ChildPlan
from cni.spec import versions
from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError, Code
from cni.spec.request import Request
from cni.spec.result import Result
from deviceplugin.pod_devices import PodHoldings
from host.errors import HostError, NamespaceGone
from host.namespaces import NetworkNamespace
from host.netlink import link_changes, links
from host.netlink.interface_addresses import add_routes
from host.netlink.links import Link
from host.netlink.sockets import Rtnetlink, netlink
from host.sysfs import infiniband
from policy.allowance import Allowance


class IPoIB(RailPlugin):
    name: ClassVar = "ipoib"
    masters: ClassVar = (options.AUTO,)

    def attach(self, request: Request, complete: Complete) -> dict[str, Any]:
        """Give the pod an IPoIB interface, with addresses if an IPAM plugin is named."""
        wanted = options.read(request)
        allowance = options.allowed(wanted, self._allowance(request))
        ipam, allowance = self._ipam_of_add(request, allowance)
        attachment = Attachment.of(request)
        with self._attaching(attachment, request) as sandbox, Undo() as undo:
            namespace, host, pod = sandbox.namespace, sandbox.host, sandbox.pod
            plan, holdings = self._choose(host, request, wanted, allowance)
            wanted = plan.options
            record = child.record_of(plan, wanted)
            entry = JournalEntry.begun(
                self.name, request, namespace, self.paths.boot_id(), record, wanted.pod
            )
            self.journal.write(entry)
            undo.last(lambda: self.journal.remove(attachment))
            answer = Result()
            if ipam is not None:
                undo.register("the addresses", ipam.undo)
                answer = ipam.add(record.segment, plan.allowance)
            for route in (host, pod):
                undo.register("the child", partial(child.remove, route, attachment))
            made = child.make(host, pod, namespace, attachment, plan)
            cidrs = answer.cidrs
            if ipam is not None and ipam.unprobed:
                up = child.configure(pod, namespace, made, cidrs, wanted, set_addresses=False)
                up = self._wait_for_carrier(sandbox, up, plan)
                answer = probing.probed(answer, ipam, pod, namespace, up)
                cidrs = answer.cidrs
            made = child.configure(pod, namespace, made, cidrs, wanted)
            add_routes(pod, made, results.hops(answer))
            ready = self._wait_for_carrier(sandbox, made, plan)
            probing.announce_addresses(namespace, ready, cidrs)
            sandbox.require_still_there()
            interface = results.interface_of(
                self.paths, request, mac=ready.mac, mtu=ready.mtu, bdf=plan.bdf, rdma=plan.rdma
            )
            document = results.document(request, interface, answer, wanted.dns)
            job_partition.write(self.paths, self.journal, holdings, request.container_id)
            record = msgspec.structs.replace(record, mac=ready.mac)
            complete(entry.attached(record, cidrs, record.segment))
        return document

    def detach(self, attachment: Attachment, request: Request, entry: JournalEntry | None) -> None:
        """Delete the attachment's child. Raises HostError while a dying namespace has the child."""
        mac = _recorded_mac(entry)
        removed = False
        own_gone = entry is not None  # whether the namespace that the entry names is gone
        with namespaces_of(request, entry) as opened:
            for namespace, pod in opened:
                own = entry is not None and namespace.identity == entry.netns_identity
                own_gone = own_gone and not own
                removed |= child.remove(pod, attachment, mac if own else "")
        if entry is not None and removed:
            return
        with netlink() as host:
            if entry is None or not own_gone:
                child.remove(host, attachment, on_host=True)
            elif not wait_until(
                lambda: child.remove(host, attachment, mac, on_host=True), child.RETURN_TIME, 0.05
            ):
                await_return(self.journal, entry, f'"{entry.ifname}"')

    def adopt(self, attachment: Attachment, request: Request) -> JournalEntry | None:
        """Write the entry of a child that ipoib-cni made.

        The ADD's result identifies the child. Before CNI 0.4 the interface's name identifies the
        child.
        """
        previous = results.previous_interface(request)
        if previous is None and versions.at_least(request.cni_version, "0.4.0"):
            return None
        mac = previous.mac if previous is not None else ""
        with ExitStack() as stack:
            namespace = None
            try:
                opened = NetworkNamespace.open(request.netns, request.netns_descriptor)
            except NamespaceGone:
                found = _returned(mac, child.RETURN_TIME if request.netns else 0.0)
            else:
                namespace = stack.enter_context(opened)
                namespace.look_at_path()
                found = child.unmarked(
                    stack.enter_context(netlink(namespace)), mac, attachment.ifname
                )
            if found is None or self._has(found.mac):
                return None
            record = child.record_of_adopted(found)
            boot_id = self.paths.boot_id()
            entry = JournalEntry.begun(self.name, request, namespace, boot_id, record)
        entry = entry.attached(record, ())
        self.journal.write(entry)
        return entry

    def _has(self, mac: str) -> bool:
        """Whether the journal has an attachment whose child has the address `mac`."""
        entries = (entry for entry in self.journal.entries() if isinstance(entry, JournalEntry))
        return any(entry.plugin == self.name and _recorded_mac(entry) == mac for entry in entries)

    def remove_strays(self) -> list[str]:
        """Delete children that came back from dead namespaces, except those that a DEL awaits."""
        removed = []
        with netlink() as host:
            returned = child.returned(host)
            entries = self.journal.entries() if returned else ()
            awaited = [entry.attachment for entry in entries if isinstance(entry, JournalEntry)]
            for link in returned:
                with suppress(HostError):  # the next sweep tries again
                    if not any(child.is_ours(link, attachment) for attachment in awaited):
                        link_changes.delete(host, link)
                        removed.append(link.name)
        return removed

    def compare(self, attachment: Attachment, request: Request) -> None:
        """Raise CNIError 102 if the child differs from the record or prevResult."""
        options.read(request)
        child.check(self.journal, attachment, request)

    def require_ready(self, request: Request) -> None:
        """Raise CNIError unless there is a parent that is up and has an active port."""
        wanted = options.read(request)
        self._require_possible(match_device=wanted.match_device)
        require_records(self.paths)
        with netlink() as host:
            plan = parents.choose(host, self.paths, wanted)
            port = infiniband.port_of(self.paths, plan.parent)
        if port is not None and port.state != "ACTIVE":
            reason = parents.why_no_carrier(self.paths, plan, plan.parent)
            raise CNIError(Code.UNAVAILABLE, f'parent "{plan.parent.name}": {reason}')

    def _choose(
        self, host: Rtnetlink, request: Request, wanted: IpoibOptions, allowance: Allowance
    ) -> tuple[ChildPlan, PodHoldings]:
        match = matched(
            self.paths,
            request,
            wanted.pod,
            needed=not wanted.masters,
            match_device=wanted.match_device,
            allowance=allowance,
        )
        with match.choosing():
            plan = parents.choose(host, self.paths, wanted, request, match)
            match.take(plan.hca)
        return plan, match.holdings

    def _wait_for_carrier(self, sandbox: Sandbox, moved: Link, plan: ChildPlan) -> Link:
        """Wait for the child's carrier. Raises CNIError 11 after `carrier_wait` seconds."""
        seconds = plan.options.carrier_wait
        ready = links.await_carrier(sandbox.pod, moved, seconds)
        if ready.carrier or not seconds:
            return ready
        parent = links.by_index(sandbox.host, plan.parent.index)
        reason = parents.why_no_carrier(self.paths, plan, parent)
        raise CNIError(
            Code.TRY_AGAIN,
            f'"{moved.name}" on parent "{plan.parent.name}" has no carrier after {seconds:g} s: '
            f'{reason} (or set "wait_carrier": 0 to attach without carrier)',
        )


def _returned(mac: str, seconds: float) -> Link | None:
    """Wait for the unmarked child with hardware address `mac` to come back to the host."""
    if not mac:
        return None
    with netlink() as host:

        def returned() -> Link | None:
            found = child.unmarked(host, mac)
            return found if found is not None and not found.up else None

        return wait_until(returned, seconds, 0.05) or None


def _recorded_mac(entry: JournalEntry | None) -> str:
    try:
        return entry.undo_as(ChildRecord).mac if entry else ""
    except JournalDamaged:
        return ""
