"""The IPAM plugin: ADD reserves addresses, DEL and GC release them, CHECK and STATUS only read.

DEL and GC do not read the options in `ipam`, so a broken configuration does not stop a release.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from base import confined, interrupts, locks
from base.interrupts import Terminated
from base.locks import Busy
from base.text import printable
from cni.spec.attachment import Attachment
from cni.spec.entry import VERSIONS
from cni.spec.errors import CNIError, Code, invalid_config
from cni.spec.notes import note
from cni.spec.request import Request
from cni.spec.result import DNS, FAMILY_020, IPConfig, Result, Route
from ipam import address_policy
from ipam.addresses import parse_interface, text
from ipam.config import resolv_conf, segments
from ipam.config.options import IpamOptions
from ipam.ranges import Range, RangeSet
from ipam.store.reservations import (
    AddressInUse,
    AddressTaken,
    AddressUnprobed,
    Grant,
    Owner,
    Quota,
    RangeUsage,
    Reservation,
    unnamed,
)
from ipam.store.sqlite_store import SeenRanges
from ipam.store_choice import Stores
from policy import rules
from policy.allowance import Allowance, of_pod
from policy.rules import Policy


class AddressPlugin:
    """The verbs of `podfabric-ipam`. The caller holds the attachment's lock."""

    def __init__(
        self, stores: Stores, boot_id: Callable[[], str], policy: rules.Source = Policy
    ) -> None:
        self._stores = stores
        self._store = stores.of_node
        self._boot_id = boot_id
        self._policy = policy
        self._seen = SeenRanges()

    def probes_all(self, request: Request) -> bool:
        """Whether each address is probed before use."""
        return bool(self._stores.options(request).probe)

    def settle_probes(self, request: Request, grant: Grant, answers: Mapping[str, str]) -> None:
        """Record that the addresses `grant.unprobed` were probed.

        Raises AddressInUse if a machine answered.
        """
        open_ = [
            each.reservation for each in grant.granted if each.reservation.address in grant.unprobed
        ]
        self._store(self._boot()).settle_probes(
            [each for each in open_ if each.address not in answers],
            [each for each in open_ if each.address in answers],
        )
        if answers:
            error = AddressInUse(answers)
            self._report(request, error)
            raise error

    def pass_unprobed(self, request: Request, grant: Grant, why: str) -> None:
        """Report that the attachment uses `grant.unprobed` without a probe."""
        self._report(request, AddressUnprobed(grant.unprobed, why))

    def _report(self, request: Request, error: CNIError) -> None:
        note(printable(f"ADD {_attachment(request)}: {error}"))
        self._stores.failed(Owner(_attachment(request), request.arguments.pod), error)

    def allowance(self, request: Request) -> Allowance:
        """The rules for the pod that allow this configuration.

        Raises CNIError 121 if no rule allows the configuration, and 5 or 11 if the rules cannot be
        read."""
        return self.permitted(request, of_pod(self._policy(), request.arguments.pod))

    def permitted(self, request: Request, allowed: Allowance) -> Allowance:
        """The rules of `allowed` that allow this configuration.

        Raises CNIError 121 if no rule allows the configuration.
        """
        allowed = address_policy.of_type(allowed, request.config.ipam.type)
        return address_policy.of_configuration(allowed, *self._stores.asked(request))

    def reserve(
        self,
        request: Request,
        segment: str | None = None,
        allowed: Allowance | None = None,
        answered: Collection[int] = (),
    ) -> tuple[Result, Grant]:
        """Reserve addresses. Returns the result, and the grant that `undo` needs.

        Without `segment`, the link is read from the configuration. Without `allowed`, the allowance
        is computed from the rules. Addresses in `answered` are not reserved.
        """
        if allowed is None:
            allowed = self.allowance(request)
        options, final = self._stores.asked(request)
        if options.pools:  # the pools may have changed since the rules were applied
            allowed = address_policy.of_configuration(allowed, options, final)
        owner, paths = _owner(request, allowed), allowed.host_paths
        may_be_private = allowed.may("private_ranges", True)
        sets = [range_set.without(answered) for range_set in final] if answered else final
        _require_answerable(sets, request)
        alone = () if may_be_private else _private_ranges(options, sets)
        _note_ignored(options, paths)
        self._seen.see(options.sets)
        dns = options.dns
        if options.resolv_conf:
            dns = resolv_conf.read(options.resolv_conf, paths)
        if segment is None:
            segment = segments.of_config(request.config)
        store = self._stores.of_request(options, self._boot())
        try:
            grant = store.reserve(owner, sets, segment=segment, alone=alone)
        except CNIError as error:
            if isinstance(error, AddressTaken) and error.holder:
                note(printable(f"ADD {owner.attachment}: {error.holder}"))
            if options.pools and error.code == Code.NO_FREE_ADDRESS:
                error = CNIError(error.code, f"{', '.join(options.pools)}: {error.message}")
            raise error from None
        if options.probe:
            every = tuple(each.reservation.address for each in grant.granted)
            grant = replace(grant, unprobed=every)
        return _result(grant, options, dns), grant

    def undo(self, grant: Grant) -> None:
        self._store(self._boot()).undo(grant)

    def release_since(self, request: Request, since: int) -> None:
        """Release the attachment's addresses, unless one of them is older than `since`."""
        held = self._store("").held_by(_attachment(request))
        if held and all(reservation.since >= since for reservation in held):
            self.delete(request)

    def delete(self, request: Request) -> None:
        attachment = _attachment(request)
        store = self._store("")
        if not store.release(attachment):
            store.release(unnamed(attachment))

    def release_stale(self) -> list[Reservation]:
        return self._store(self._boot()).release_stale()

    def check(self, request: Request) -> None:
        """Compare the addresses of prevResult with the attachment's reservations."""
        options = self._stores.options(request)
        previous = request.previous_result
        if previous is None:
            raise invalid_config("prevResult missing: pass the result of the ADD to CHECK")
        attachment = _attachment(request)
        store = self._store("")
        reserved = store.held_by(attachment) or store.held_by(unnamed(attachment))
        held = {reservation.address for reservation in reserved}
        for ip in previous.ips:
            address, _ = parse_interface(ip.address)
            if text(address) not in held and _is_ours(address, options):
                raise CNIError(
                    Code.CHECK_FAILED,
                    f"{text(address)} is not reserved for {attachment}: recreate the pod, "
                    "because another pod may get the address",
                )
        if not held:
            raise CNIError(
                Code.CHECK_FAILED, f"no address is reserved for {attachment}: recreate the pod"
            )

    def gc(self, request: Request) -> None:
        """Release the addresses of attachments that are in this network but not in the request."""
        valid = request.config.valid_attachments
        if valid is None:
            why = 'it has no "cni.dev/valid-attachments"'
            note(printable(f"GC of network {request.network} released nothing: {why}"))
            return
        interrupts.require_client()  # a runtime that gave up may have added attachments since
        self._store("").collect(request.network, valid)

    def status(self, request: Request) -> None:
        """Raise CNIError 50 if an ADD would get no address now."""
        try:
            options = self._stores.options(request)
        except CNIError as error:
            if error.code != Code.TRY_AGAIN:
                raise
            raise CNIError(Code.UNAVAILABLE, error.message) from None
        try:
            full = self._stores.of_request(options, self._boot()).exhausted(options.sets)
        except CNIError as error:
            raise CNIError(Code.UNAVAILABLE, error.message) from None
        if full:
            raise CNIError(
                Code.UNAVAILABLE,
                f"no free address: {full}: delete pods that need no address any more, or widen "
                "the range",
            )

    def usage(self) -> list[RangeUsage]:
        """The usage of each range that has a reservation or a recent ADD. Raises CNIError."""
        return self._store("").usage(self._seen.all())

    def _boot(self) -> str:
        try:
            return self._boot_id()
        except OSError as error:
            raise CNIError(
                Code.IO_FAILURE,
                f"cannot read {error.filename}, the id of this boot: {error.strerror}: see that "
                "/proc is mounted",
            ) from None


class IpamExecutable:
    """A `cni.spec.plugin.Plugin` for runtimes and other projects' interface plugins. With lock
    files in `directory`, two calls of one attachment never overlap."""

    versions: Sequence[str] = VERSIONS

    def __init__(self, addresses: AddressPlugin, directory: Path) -> None:
        self._addresses = addresses
        self._directory = directory

    def add(self, request: Request) -> Result | dict[str, Any]:
        """No address is probed, because the caller configures the interface."""
        if self._addresses.probes_all(request):
            raise invalid_config(
                '"ipam.probe": only podfabric\'s interface plugins probe addresses: remove the key'
            )
        allowance = self._addresses.allowance(request)
        with self._locked(request):
            if request.unanswered_since is not None:
                self._addresses.release_since(request, request.unanswered_since)
            grant = Grant()
            try:
                with interrupts.held():
                    result, grant = self._addresses.reserve(request, allowed=allowance)
                interrupts.hold()  # the addresses are reserved: the call can no longer be cancelled
            except Terminated:
                with interrupts.held():
                    self._addresses.undo(grant)
                raise
        if grant.unprobed:
            why = "only podfabric's interface plugins probe addresses"
            self._addresses.pass_unprobed(request, grant, why)
        return result

    def delete(self, request: Request) -> None:
        with self._locked(request):
            self._addresses.delete(request)

    def check(self, request: Request) -> None:
        with self._locked(request):
            self._addresses.check(request)

    def gc(self, request: Request) -> None:
        self._addresses.gc(request)

    def status(self, request: Request) -> None:
        self._addresses.status(request)

    @contextmanager
    def _locked(self, request: Request) -> Iterator[None]:
        attachment = _attachment(request)
        path = f"{self._directory}/addresses-{attachment.key}"
        lock = locks.locked(path, f"the addresses of {attachment}")
        try:
            lock.acquire()
        except Busy as busy:
            raise CNIError(Code.TRY_AGAIN, str(busy)) from None
        except OSError as error:
            raise CNIError(
                Code.IO_FAILURE,
                f"cannot lock {path}: {error.strerror}: see that root can "
                f"write to {self._directory}",
            ) from None
        try:
            interrupts.require_client()
            yield
        finally:
            lock.release()


def _attachment(request: Request) -> Attachment:
    _require_text(request.ifname, "CNI_IFNAME")
    return Attachment(request.network, request.container_id, request.ifname)


def _owner(request: Request, allowed: Allowance) -> Owner:
    pod = request.arguments.pod
    for value in (pod.namespace, pod.name, pod.uid):
        _require_text(value, "CNI_ARGS")
    of_pod, of_namespace = map(allowed.most, ("addressesPerPod", "addressesPerNamespace"))
    limited = of_pod is not None or of_namespace is not None
    quota = Quota(of_pod, of_namespace, allowed.titles()) if limited else None
    return Owner(_attachment(request), pod, quota)


def _note_ignored(options: IpamOptions, directories: Sequence[str]) -> None:
    """Log the notes of the configuration, and one line with the keys that have no effect."""
    for line in options.notes:
        note(printable(line))
    idle, hint = list(options.idle), ""
    if options.resolv_conf and not confined.is_below(directories, options.resolv_conf):
        idle.append("resolvConf")
        hint = ' (resolvConf needs a rule that allows its directory in "set.hostPaths")'
    if idle:
        note(f"without effect on this node: {', '.join(f'ipam.{key}' for key in idle)}{hint}")


def _require_text(value: str, name: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise CNIError(Code.INVALID_ENVIRONMENT, f"{name} is not UTF-8") from None


def _require_answerable(sets: Sequence[RangeSet], request: Request) -> None:
    """Raise CNIError 7 if there are no sets, or too many for the request's CNI version."""
    if not sets:
        raise invalid_config(
            'the network has no addresses: set "range" (or "ipRanges", "ranges", "addresses") '
            'in "ipam"'
        )
    families = [range_set.family for range_set in sets]
    if request.cni_version in FAMILY_020 and len(families) > len(set(families)):
        raise invalid_config(
            f"CNI version {request.cni_version} does not support more than 1 address per family: "
            'set "cniVersion" to "1.0.0"'
        )


def _result(grant: Grant, options: IpamOptions, dns: DNS) -> Result:
    ips, routes = [], list(options.routes)
    for each in grant.granted:
        gateway = None if each.range.gateway is None else text(each.range.gateway)
        prefix = each.range.network.family_prefix
        ips.append(IPConfig(f"{each.reservation.address}/{prefix}", gateway))
        if gateway is not None:
            routes += (Route(dst=dst, gw=gateway) for dst in each.range.routes)
    return Result(ips=tuple(ips), routes=tuple(routes), dns=dns)


def _private_ranges(options: IpamOptions, sets: Sequence[RangeSet]) -> tuple[Range, ...]:
    """All private ranges of the network, even if the pod requests one address."""
    if options.pools:
        return ()
    own = (*options.sets, *options.static) if options.sets else sets
    return tuple(range_ for range_set in own for range_ in range_set.ranges if range_.why_private)


def _is_ours(address: int, options: IpamOptions) -> bool:
    return any(
        range_.first <= address <= range_.last
        for range_set in (*options.sets, *options.static)
        for range_ in range_set.ranges
    )
