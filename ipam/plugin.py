"""The IPAM plugin: ADD reserves, DEL releases, CHECK compares, GC collects, STATUS looks.

ADD and CHECK read the configuration strictly. DEL and GC go by the attachment alone, so that they
also release addresses reserved under an earlier configuration, or one that is broken now.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec.structs import replace

from base import confined, interrupts
from base.pod import Pod
from base.text import printable
from cni.spec.attachment import Attachment
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
    ReservedAddress,
    unnamed,
)
from ipam.store.usage import SeenRanges
from ipam.store_choice import Stores
from policy import rules
from policy.allowance import Allowance, of_pod
from policy.rules import Policy


class AddressPlugin:
    """`podfabric-ipam`, for callers that hold the attachment's lock: see `executable`.

    Only verbs that need the boot call `boot_id`. `policy` returns the rules of the node.
    """

    def __init__(
        self,
        stores: Stores,
        boot_id: Callable[[], str],
        policy: rules.Source = Policy,
    ) -> None:
        self._stores = stores
        self._store = stores.of_node
        self._boot_id = boot_id
        self._policy = policy
        self._seen = SeenRanges()

    def probes_all(self, request: Request) -> bool:
        """Whether the configuration has each address probed before it is set."""
        return bool(self._stores.options(request).probe)

    def settle_probes(self, request: Request, grant: Grant, answers: Mapping[str, str]) -> None:
        """Note what probes of the grant's `unprobed` have shown: `answers` has the hardware address
        that answered for an address. AddressInUse if there is any."""
        open_ = [
            each.reservation for each in grant.granted if each.reservation.address in grant.unprobed
        ]
        self._store(self._boot()).settle_probes(
            [each for each in open_ if each.address not in answers],
            [each for each in open_ if each.address in answers],
        )
        if answers:
            error = AddressInUse(answers)
            self._tell(request, error)
            raise error

    def pass_unprobed(self, request: Request, grant: Grant, why: str) -> None:
        """Tell people that the grant's addresses are used without a probe: they stay to be probed
        by the next who can."""
        self._tell(request, AddressUnprobed(grant.unprobed, why))

    def _tell(self, request: Request, error: CNIError) -> None:
        note(printable(f"ADD {_attachment(request)}: {error}"))
        self._stores.failed(Owner(_attachment(request), request.arguments.pod), error)

    def allowance(self, request: Request) -> Allowance:
        """What the pod's attachment may use beside what its configuration asks of this plugin.

        CNIError 121 for what is not allowed, 5 or 11 if that cannot be told.
        """
        allowed = of_pod(self._policy(), request.arguments.pod)
        return self.permitted(request, address_policy.of_type(allowed, request.config.ipam.type))

    def permitted(self, request: Request, allowed: Allowance) -> Allowance:
        """The allowance with what the configuration asks of this plugin. CNIError 121."""
        return address_policy.of_configuration(allowed, *self._stores.asked(request))

    def reserve(
        self,
        request: Request,
        segment: str | None = None,
        allowed: Allowance | None = None,
        answered: Collection[int] = (),
    ) -> tuple[Result, Grant]:
        """Reserve addresses; the result, and what `undo` needs.

        `segment` is the link on which the addresses are used; None takes the configuration's.
        `allowed` is what is left of the attachment's allowance; None asks for it. `answered` are
        addresses for which other machines have answered: they are not handed out.
        """
        if allowed is None:
            allowed = self.allowance(request)
        options, final = self._stores.asked(request)
        if options.pools:  # they may have changed since the rules were asked
            allowed = address_policy.of_configuration(allowed, options, final)
        sets = [range_set.without(answered) for range_set in final]
        _require_answerable(sets, request)
        alone = _private_ranges(options, sets)
        _note_ignored(options, allowed.host_paths)
        self._seen.see(options.sets)
        dns = options.dns
        if options.resolv_conf:
            dns = resolv_conf.read(options.resolv_conf, allowed.host_paths)
        owner = _owner(request, allowed)
        try:
            grant = self._stores.of_request(options, self._boot()).reserve(
                owner,
                sets,
                segment=segments.of_config(request.config) if segment is None else segment,
                alone=() if allowed.may("private_ranges", True) else alone,
            )
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
        """Release what this `reserve` reserved, and nothing that another call did."""
        self._store(self._boot()).undo(grant)

    def release_since(self, request: Request, since: int) -> None:
        """Release what an agent reserved for this call before it died; the call began at `since`.

        Keeps what the attachment has had for longer.
        """
        held = self._store("").held_by(_attachment(request))
        if held and all(reservation.since >= since for reservation in held):
            self.delete(request)

    def delete(self, request: Request) -> None:
        """Release all addresses of the attachment, if it has any."""
        attachment = _attachment(request)
        store = self._store("")
        if not store.release(attachment):
            store.release(unnamed(attachment))

    def release_stale(self) -> list[Reservation]:
        """See SqliteStore.release_stale: no sandbox of this node outlives its boot."""
        return self._store(self._boot()).release_stale()

    def check(self, request: Request) -> None:
        """Compare prevResult's addresses with those reserved for the attachment."""
        options = self._stores.options(request)
        previous = request.previous_result
        if previous is None:
            raise invalid_config("prevResult missing: CHECK compares it with the reservations")
        attachment = _attachment(request)
        store = self._store("")
        reserved = store.held_by(attachment) or store.held_by(unnamed(attachment))
        held = {reservation.address for reservation in reserved}
        for ip in previous.ips:
            address, _ = parse_interface(ip.address)
            if text(address) not in held and _is_ours(address, options):
                raise CNIError(
                    Code.CHECK_FAILED,
                    f"{text(address)} is not reserved for {attachment}: recreate the pod "
                    "before another one gets the address",
                )
        if not held:
            raise CNIError(
                Code.CHECK_FAILED, f"no address is reserved for {attachment}: recreate the pod"
            )

    def gc(self, request: Request) -> None:
        """Release the addresses of this network's attachments that the runtime does not list."""
        valid = request.config.valid_attachments
        if valid is None:
            note(
                printable(
                    f'GC of network {request.network}: without "cni.dev/valid-attachments", '
                    "nothing was released"
                )
            )
            return
        interrupts.require_client()  # a runtime that left may have attached others meanwhile
        self._store("").collect(request.network, valid)

    def status(self, request: Request) -> None:
        """CNIError 50 if an ADD would get no address now."""
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
                f"no free address in {full}. Delete pods that no longer need one, or widen the "
                "range",
            )

    def usage(self) -> list[RangeUsage]:
        """How full the ranges of recent ADDs and of all reservations are.

        CNIError if the store cannot be read.
        """
        return self._store("").usage(self._seen.all())

    def _boot(self) -> str:
        try:
            return self._boot_id()
        except OSError as error:
            raise CNIError(
                Code.IO_FAILURE,
                f"cannot tell which boot this is: {error.filename}: {error.strerror}: see that "
                "/proc is mounted",
            ) from None


def _attachment(request: Request) -> Attachment:
    _require_text(request.ifname, "CNI_IFNAME")
    return Attachment(request.network, request.container_id, request.ifname)


def _owner(request: Request, allowed: Allowance) -> Owner:
    return Owner(_attachment(request), _encodable(request.arguments.pod), _quota(allowed))


def _note_ignored(options: IpamOptions, directories: Sequence[str]) -> None:
    """Tell the operator what of the configuration has no effect: the keys in one line."""
    for line in options.notes:
        note(printable(line))
    idle, hint = list(options.idle), ""
    if options.resolv_conf and not confined.is_below(directories, options.resolv_conf):
        idle.append("resolvConf")
        hint = ' (the administrator can allow directories: "set.hostPaths" of a rule)'
    if idle:
        note(f"without effect on this node: {', '.join(f'ipam.{key}' for key in idle)}{hint}")


def _quota(allowed: Allowance) -> Quota | None:
    """What the rules left say of how many addresses pod and namespace may have."""
    of_pod, of_namespace = map(allowed.most, ("addressesPerPod", "addressesPerNamespace"))
    limited = of_pod is not None or of_namespace is not None
    return Quota(of_pod, of_namespace, allowed.titles()) if limited else None


def _encodable(pod: Pod) -> Pod:
    for value in (pod.namespace, pod.name, pod.uid):
        _require_text(value, "CNI_ARGS")
    return pod


def _require_text(value: str, name: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise CNIError(Code.INVALID_ENVIRONMENT, f"{name} is not UTF-8") from None


def _require_answerable(sets: Sequence[RangeSet], request: Request) -> None:
    """CNIError 7, before anything is reserved, if no result of this version could hold the sets."""
    if not sets:
        raise invalid_config(
            'the network gives no address: set "range" (or "ipRanges", "ranges", "addresses") '
            'in "ipam"'
        )
    families = [range_set.family for range_set in sets]
    if request.cni_version in FAMILY_020 and len(families) > len(set(families)):
        raise invalid_config(
            f"CNI version {request.cni_version} does not support more than 1 address per family: "
            'set "cniVersion" to "1.0.0"'
        )


def _result(grant: Grant, options: IpamOptions, dns: DNS) -> Result:
    behind = (
        Route(dst=dst, gw=text(each.range.gateway))
        for each in grant.granted
        for dst in each.range.routes
        if each.range.gateway is not None
    )
    routes = (*options.routes, *behind)
    return Result(ips=tuple(map(_ip, grant.granted)), routes=routes, dns=dns)


def _ip(granted: ReservedAddress) -> IPConfig:
    gateway = granted.range.gateway
    return IPConfig(
        f"{granted.reservation.address}/{granted.range.network.family_prefix}",
        None if gateway is None else text(gateway),
    )


def _private_ranges(options: IpamOptions, sets: Sequence[RangeSet]) -> tuple[Range, ...]:
    """The whole ranges of a network that makes them private, not only a requested address."""
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
