"""The plugins `macvlan` and `ipvlan`: the steps of each verb, in order.

After a failure or SIGTERM, an ADD undoes its steps in reverse order. If the process is killed, the
next DEL, GC or sweep reads the journal and undoes the steps.
"""

from functools import partial
from typing import Any, ClassVar

from cni.attachments import probing, results
from cni.attachments.journal import JournalEntry
from cni.attachments.lifecycle import Sandbox, Undo
from cni.attachments.matching import matched, require_records
from cni.attachments.rail_plugin import Complete, RailPlugin
from cni.attachments.sandbox import namespaces_of
from cni.macvlan import masters, offspring, options
from cni.macvlan.masters import MacvlanPlan
from cni.macvlan.offspring import MacvlanRecord
from cni.macvlan.options import MacvlanOptions
from cni.spec import versions
from cni.spec.attachment import Attachment
from cni.spec.request import Request
from cni.spec.result import Result
from host.netlink import interface_addresses, links
from host.netlink.interface_addresses import add_routes
from host.netlink.links import Link
from ipam.delegation import IpamCall
from policy.allowance import Allowance

CARRIER_WAIT = 0.2  # seconds, only for the announcement: the link of the master may be down


class Macvlan(RailPlugin):
    name: ClassVar = "macvlan"
    masters: ClassVar = (options.AUTO,)

    def attach(self, request: Request, complete: Complete) -> dict[str, Any]:
        """Give the pod a child of the master, with addresses if an IPAM plugin is named."""
        wanted = options.read(request, self.name)
        allowance = options.allowed(wanted, self._allowance(request))
        ipam, allowance = self._ipam_of_add(request, allowance)
        attachment = Attachment.of(request)
        with self._attaching(attachment, request) as sandbox, Undo() as undo:
            plan = self._choose(sandbox, request, wanted, allowance)
            record = MacvlanRecord.of(plan)
            entry = JournalEntry.begun(
                *(self.name, request, sandbox.namespace, self.paths.boot_id(), record, wanted.pod)
            )
            self.journal.write(entry)
            undo.last(lambda: self.journal.remove(attachment))
            answer, needs_interface = Result(), wanted.ipam_type == "dhcp"
            if ipam is not None:
                undo.register("the addresses", ipam.undo)
                if not needs_interface:
                    answer = ipam.add(record.master, plan.allowance)
            undo.register(
                "the child", partial(offspring.remove, sandbox.pod, self.name, attachment)
            )
            made = offspring.make(sandbox.host, sandbox.pod, sandbox.namespace, attachment, plan)
            if ipam is not None and needs_interface:
                interface_addresses.configure(sandbox.pod, sandbox.namespace, made, [])
                answer = ipam.add(record.master, plan.allowance)
            ready, answer = self._give_addresses(sandbox, made, plan, answer, ipam)
            sandbox.require_still_there()
            interface = results.interface_of(
                self.paths, request, mac=ready.mac, mtu=ready.mtu, bdf=plan.bdf, rdma=plan.rdma
            )
            document = results.document(request, interface, answer, wanted.dns)
            complete(entry.attached(record, answer.cidrs, record.master))
        return document

    def detach(self, attachment: Attachment, request: Request, entry: JournalEntry | None) -> None:
        """Delete the attachment's interface in the namespaces that may have the interface.

        Without an entry, the ADD's result tells that the reference plugin made the interface.
        Before CNI 0.4 a DEL has no result.
        """
        unrecorded = entry is None and (
            results.previous_interface(request) is not None
            or not versions.at_least(request.cni_version, "0.4.0")
        )
        with namespaces_of(request, entry) as opened:
            for _, pod in opened:
                offspring.remove(pod, self.name, attachment, unrecorded=unrecorded)

    def adopt(self, attachment: Attachment, request: Request) -> JournalEntry | None:
        """No entry: `detach` finds the interface of the reference plugin by its name."""
        return None

    def compare(self, attachment: Attachment, request: Request) -> None:
        """Raise CNIError 102 if the interface differs from the record or prevResult."""
        options.read(request, self.name)
        offspring.check(self.journal, attachment, request, self.name)

    def require_ready(self, request: Request) -> None:
        """Raise CNIError for an invalid configuration, or if the pods' devices are unknown."""
        wanted = options.read(request, self.name)
        self._require_possible(match_device=wanted.match_device)
        require_records(self.paths)

    def _choose(
        self, sandbox: Sandbox, request: Request, wanted: MacvlanOptions, allowance: Allowance
    ) -> MacvlanPlan:
        match = matched(
            self.paths,
            request,
            wanted.pod,
            needed=wanted.auto,
            match_device=wanted.match_device,
            allowance=allowance,
        )
        route = sandbox.pod if wanted.in_container else sandbox.host
        with match.choosing():
            plan = masters.choose(route, self.paths, wanted, request, match)
            match.take(plan.hca)
        return plan

    def _give_addresses(
        self,
        sandbox: Sandbox,
        made: Link,
        plan: MacvlanPlan,
        answer: Result,
        ipam: IpamCall | None,
    ) -> tuple[Link, Result]:
        """Probe, set and announce the addresses. Returns the interface and the used answer."""
        pod, namespace = sandbox.pod, sandbox.namespace
        configure = partial(
            interface_addresses.configure,
            *(pod, namespace, made),
            sysctls=offspring.OWN_ADDRESSES,
            accept_ra=plan.options.accept_ra,
        )
        if ipam is not None and ipam.unprobed:
            up = configure(answer.cidrs, set_addresses=False)
            answer = probing.probed(answer, ipam, pod, namespace, up)
        ready = configure(answer.cidrs)
        add_routes(pod, ready, results.hops(answer))
        offspring.await_gids(self.paths, plan, answer.cidrs)
        if answer.cidrs:
            ready = links.await_carrier(pod, ready, CARRIER_WAIT)
            probing.announce_addresses(namespace, ready, answer.cidrs)
        return ready, answer


class Ipvlan(Macvlan):
    name: ClassVar = "ipvlan"
