"""The five verbs of `ipoib`, top to bottom in the order things happen.

What an ADD does is undone in reverse when any later step fails, or on SIGTERM; what a kill
leaves is in the journal, and the DEL that follows, a GC or a sweep undoes it from there.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from base import interrupts
from base.paths import Paths
from cni.attachments import carrier, results
from cni.attachments.entitlement import require_allowed
from cni.attachments.journal import Journal
from cni.attachments.matching import matched, rdma_beside, require_records, tell
from cni.attachments.removal import Remover
from cni.attachments.requests import (
    attached,
    attachment_of,
    begun,
    explained,
    hops,
    ipam_kept,
    namespace_of,
    require_still_there,
    require_store,
)
from cni.attachments.undo import Undo
from cni.ipoib import check, child, options, parents
from cni.ipoib.options import IpoibOptions
from cni.ipoib.parents import ChildPlan
from cni.ipoib.removal import Children
from cni.policy import rules
from cni.policy.rules import Policy
from cni.spec.attachment import Attachment
from cni.spec.entry import VERSIONS
from cni.spec.errors import CNIError, Code
from cni.spec.request import Request
from cni.spec.result import Interface, Result, require_convertible
from host import announce, infiniband, links
from host.addresses import add_routes
from host.links import Link
from host.netlink import Rtnetlink, netlink
from ipam.delegation import OURS, TAKEN_OVER, Delegation
from ipam.plugin import AddressPlugin


class IPoIB:
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
        self._remover = Remover(
            Children(self._journal), self._journal, paths, self._ipam.of_removal
        )

    def add(self, request: Request) -> dict[str, Any]:
        """Give the pod an IPoIB interface, with addresses if an IPAM plugin is named."""
        wanted = options.read(request)
        policy = self._policy()
        require_allowed(policy, match_device=wanted.match_device)
        ipam = self._ipam.of(request)
        require_convertible(request.cni_version, has_addresses=bool(wanted.ipam_type))
        results.previous_document(request)
        attachment = attachment_of(request)
        with explained(), self._journal.locked(attachment), ExitStack() as opened:
            pod_namespace = opened.enter_context(namespace_of(request))
            host = opened.enter_context(netlink())
            pod = opened.enter_context(netlink(pod_namespace))

            self._remover.settle_earlier_attempt(attachment, request)
            plan = self._choose(host, request, wanted, policy)
            _refuse_taken_name(pod, request)
            record = _record(plan, wanted)
            boot_id = self._paths.boot_id()
            entry = begun("ipoib", request, pod_namespace, boot_id, record, wanted.pod)
            if wanted.ipam_type in (OURS, TAKEN_OVER):
                require_store(self._journal, self._paths)

            with Undo() as undo:
                self._journal.write(entry)
                undo.last(lambda: self._journal.remove(attachment))
                answer = Result()
                if ipam is not None:
                    undo.register("the addresses", ipam.undo)
                    answer = ipam.add(record.segment)
                undo.register("the child", lambda: _remove_child(host, pod, attachment))
                made = child.make(host, attachment, plan)
                moved = child.move(host, pod, pod_namespace, made, attachment)
                cidrs = [ip.address for ip in answer.ips]
                moved, given = child.configure(pod, pod_namespace, moved, cidrs, wanted.proxy_arp)
                add_routes(pod, moved, hops(answer))
                ready = self._wait_for_carrier(host, pod, moved, plan, wanted.carrier_wait)
                if ready.carrier:
                    announce.announce(pod_namespace, ready, given)
                require_still_there(pod_namespace)
                interface = self._interface(request, ready, plan)
                tell(self._paths, request, interface)
                document = results.document(request, interface, answer, wanted.dns)
                interrupts.hold()  # what is attached now is answered as attached
                record = msgspec.structs.replace(record, mac=ready.mac)
                self._journal.write(attached(entry, record, cidrs))
        return document

    def delete(self, request: Request) -> None:
        """Take the interface away and release its addresses, whatever of them is left."""
        attachment = attachment_of(request)
        with explained(), self._journal.locked(attachment):
            self._remover.remove(attachment, request)

    def check(self, request: Request) -> None:
        """Compare everything that was set with what the kernel shows, and ask the IPAM plugin."""
        options.read(request)
        attachment = attachment_of(request)
        with explained(), self._journal.locked(attachment):
            check.check(self._journal, attachment, request)
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
        """Whether an ADD could succeed now: a parent, its port, and the IPAM plugin."""
        try:
            wanted = options.read(request)
            require_allowed(self._policy(), match_device=wanted.match_device)
            require_records(self._paths)
            ipam = self._ipam.of(request)
            with explained(), netlink() as host:
                plan = parents.choose(host, self._paths, wanted)
                port = infiniband.port_of(self._paths, plan.parent)
        except CNIError as error:
            raise CNIError(Code.UNAVAILABLE, error.message, error.details) from None
        if port is not None and port.state != "ACTIVE":
            reason = parents.why_no_carrier(self._paths, plan, plan.parent)
            raise CNIError(Code.UNAVAILABLE, f'parent "{plan.parent.name}": {reason}')
        with explained():
            if ipam is not None:
                ipam.status()

    def _choose(
        self, host: Rtnetlink, request: Request, wanted: IpoibOptions, policy: Policy
    ) -> ChildPlan:
        """The parent, on an HCA that the pod was given if it was given any."""
        match = matched(
            self._paths,
            request,
            wanted.pod,
            needed=not wanted.masters,
            wanted=wanted.match_device,
            policy=policy,
        )
        with match.choosing():
            plan = parents.choose(host, self._paths, wanted, match)
            match.take(plan.hca)
        return plan

    def _interface(self, request: Request, ready: Link, plan: ChildPlan) -> Interface:
        rdma, uverbs = rdma_beside(self._paths, plan.rdma)
        return Interface(
            name=ready.name,
            mac=ready.mac,
            mtu=ready.mtu,
            sandbox=request.netns,
            pciID=plan.bdf,
            rdmaDevice=rdma,
            uverbs=uverbs,
        )

    def _wait_for_carrier(
        self, host: Rtnetlink, pod: Rtnetlink, moved: Link, plan: ChildPlan, seconds: float
    ) -> Link:
        ready = carrier.awaited(pod, moved, seconds)
        if ready.carrier or not seconds:
            return ready
        parent = links.by_index(host, plan.parent.index)
        reason = parents.why_no_carrier(self._paths, plan, parent)
        raise CNIError(
            Code.TRY_AGAIN,
            f'"{moved.name}" on parent "{plan.parent.name}" has no carrier after {seconds:g} s: '
            f'{reason} (or set "wait_carrier": 0 to attach without)',
        )


def _record(plan: ChildPlan, wanted: IpoibOptions) -> child.ChildRecord:
    return child.ChildRecord(
        parent=plan.parent.name,
        pkey=plan.pkey,
        mode=plan.mode,
        mtu=plan.mtu,
        umcast=plan.umcast,
        proxy_arp=wanted.proxy_arp,
    )


def _remove_child(host: Rtnetlink, pod: Rtnetlink, attachment: Attachment) -> None:
    child.remove_from_pod(pod, attachment)
    child.remove_from_host(host, attachment)


def _refuse_taken_name(pod: Rtnetlink, request: Request) -> None:
    taken = links.find(pod, request.ifname)
    if taken is not None:
        what = f"a link of kind {taken.kind}" if taken.kind else "a link"
        raise CNIError(
            Code.INVALID_CONFIG,
            f'the pod already has {what} named "{request.ifname}": give this attachment another '
            "interface name",
        )
