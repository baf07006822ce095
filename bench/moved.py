"""A plugin for measurements: it moves an existing interface into the pod, with addresses.

`"device"` names the interface. The plugin uses the same parts as our interface plugins: journal,
undo, placement, in-process address management, announcement. It needs no hardware, so it can be
compared with host-device on any machine. `python -m bench.moved` runs an agent with it.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import msgspec

from agent import resident as agent
from base import interrupts
from base.paths import Paths
from cni.attachments.journal import Journal, JournalEntry
from cni.attachments.lifecycle import Undo, explained, sandbox_of
from cni.attachments.results import hops
from cni.spec.attachment import Attachment
from cni.spec.config import convert
from cni.spec.entry import VERSIONS
from cni.spec.request import Request
from cni.spec.result import Interface, Result
from host import announce, netdev_move
from host.errors import NamespaceGone
from host.namespaces import NetworkNamespace
from host.netdev_move import Mark, Origin
from host.netlink import interface_addresses, links
from host.netlink.interface_addresses import add_routes
from host.netlink.sockets import Rtnetlink, netlink
from ipam.delegation import Delegation, IpamCall
from ipam.plugin import AddressPlugin
from policy.rules import Policy


class _Ipam(msgspec.Struct):
    type: str = ""


class _Config(msgspec.Struct):
    device: str = ""
    ipam: _Ipam = msgspec.field(default_factory=_Ipam)


class Moved:
    """The plugin. Implements the part of `cni.spec.plugin.Plugin` that a measurement needs."""

    versions: Sequence[str] = VERSIONS

    def __init__(self, paths: Paths, addresses: AddressPlugin) -> None:
        self._paths = paths
        self._delegation = Delegation(addresses, paths.cni_bin, Policy)
        self._journal = Journal(paths)

    def add(self, request: Request) -> Result:
        """Move the device into the pod, give it addresses, announce them."""
        config = convert(request.config.keys, _Config)
        attachment = Attachment.of(request)
        mark = Mark(attachment.key)
        with explained(), self._journal.locked(attachment), ExitStack() as opened:
            if request.unanswered_since is not None:  # from an agent that died in this call
                self._remove(request, attachment, opened)
            sandbox = opened.enter_context(sandbox_of(request))
            namespace, host, pod = sandbox.namespace, sandbox.host, sandbox.pod
            device = links.require(host, config.device)
            netdev_move.require_free(pod, request.ifname)
            origin = netdev_move.origin_of(device)
            entry = JournalEntry.begun("moved", request, namespace, self._paths.boot_id(), origin)
            ipam = self._ipam(request)
            with Undo() as undo:
                self._journal.write(entry)
                undo.last(lambda: self._journal.remove(attachment))
                undo.register("the addresses", ipam.undo)
                answer = ipam.add()
                cidrs = [ip.address for ip in answer.ips]
                undo.register(
                    "the move",
                    lambda: netdev_move.restore(host, pod, request.ifname, origin, mark),
                )
                moved = netdev_move.move_in(host, pod, namespace, device, request.ifname, mark)
                ready = interface_addresses.configure(pod, namespace, moved, cidrs)
                if ready.carrier:
                    announce.announce(namespace, ready, cidrs)
                add_routes(pod, ready, hops(answer))
                sandbox.require_still_there()
                interrupts.hold()
                self._journal.write(entry.attached(origin, cidrs))
        interface = Interface(name=ready.name, mac=ready.mac, mtu=ready.mtu, sandbox=request.netns)
        ips = tuple(msgspec.structs.replace(ip, interface=0) for ip in answer.ips)
        return Result(interfaces=(interface,), ips=ips, routes=answer.routes, dns=answer.dns)

    def delete(self, request: Request) -> None:
        """Restore the device on the host, then release its addresses."""
        attachment = Attachment.of(request)
        with explained(), self._journal.locked(attachment), ExitStack() as opened:
            self._remove(request, attachment, opened)

    def check(self, request: Request) -> None:
        """Not measured."""

    def gc(self, request: Request) -> None:
        """Not measured."""

    def status(self, request: Request) -> None:
        """Not measured."""

    def _remove(self, request: Request, attachment: Attachment, opened: ExitStack) -> None:
        entry = self._journal.read(attachment)
        if entry is not None:
            self._restore(request, entry, attachment, opened)
        self._ipam(request).delete()
        self._journal.remove(attachment)

    def _restore(
        self, request: Request, entry: JournalEntry, attachment: Attachment, opened: ExitStack
    ) -> None:
        host = opened.enter_context(netlink())
        pod: Rtnetlink | None = None
        with suppress(NamespaceGone):
            namespace = NetworkNamespace.open(request.netns, request.netns_descriptor)
            pod = opened.enter_context(netlink(opened.enter_context(namespace)))
        origin, mark = entry.undo_as(Origin), Mark(attachment.key)
        netdev_move.restore(host, pod, request.ifname, origin, mark)

    def _ipam(self, request: Request) -> IpamCall:
        ipam = self._delegation.of(request)
        assert ipam is not None
        return ipam


def run(paths: Paths) -> int:
    """Run an agent that also has this plugin, until SIGTERM."""
    return agent.run(paths, lambda addresses: {"moved": lambda environ: Moved(paths, addresses)})


if __name__ == "__main__":
    sys.exit(run(Paths.from_environ(os.environ)))
