"""One ADD for several interfaces: with `"rails": "all"`, one on each HCA that the pod holds.

The first interface has the name in CNI_IFNAME ("net1"), and the next have "net1-1", "net1-2". Each
is an attachment with its own journal entry, whose `rail_of` is "net1". The runtime calls DEL, CHECK
and GC only for "net1".

A call for any of these attachments has the lock of "net1". The ADD completes the entries when all
interfaces are attached, and that of "net1" last. So a sweep removes the parts of a killed ADD.
"""

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import msgspec
from msgspec.structs import replace

from base import decoding, files, interrupts
from cni.attachments import results
from cni.attachments.journal import Journal, JournalDamaged, JournalEntry, from_bytes
from cni.attachments.lifecycle import Failures, InterfacePlugin, Undo, explained
from cni.attachments.matching import none_given
from cni.spec import config as configs
from cni.spec import rail_keys
from cni.spec import result as protocol
from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError, Code, invalid_config
from cni.spec.rail_keys import ALL, RAILS
from cni.spec.request import Request
from deviceplugin import pod_devices
from deviceplugin.pod_devices import PodDevice, Unknown
from host.namespaces import NetworkNamespace

Complete = Callable[[JournalEntry], object]
"""Stores the entry of a complete attachment. If this raises an error, the ADD undoes its steps."""

_LONGEST_NAME = 15  # bytes of an interface's name
_OF_ONE_INTERFACE = (
    *configs.DEVICE_ID_PATHS,
    *("mac", "MAC", "guid", "args.cni.mac", "args.cni.guid", "args.cni.ips"),
    *("runtimeConfig.mac", "runtimeConfig.infinibandGUID", "runtimeConfig.ips"),
)
"""Keys with a value that only one interface can have."""


class RailPlugin(InterfacePlugin):
    """An interface plugin whose ADD can attach several interfaces."""

    masters: ClassVar[tuple[str, ...]] = ()  # the values of "master" that "rails" allows

    @abstractmethod
    def attach(self, request: Request, complete: Complete) -> dict[str, Any]:
        """Give the pod one interface, and pass the last entry to `complete`. Returns the result."""

    def add(self, request: Request) -> dict[str, Any]:
        """Give the pod an interface, or with "rails" one on each HCA of the pod, or none."""
        if _rails_of(request) is None:
            return self.attach(request, self._complete)
        self._require_valid(request)
        rails = self._adds(request)
        with explained(), self.journal.locked(Attachment.of(request)):
            documents = self._attach_all(request, rails)
        merged = results.previous_document(request) or {}
        for document in documents:
            ours = protocol.convert(document, request.cni_version)
            merged = protocol.after_previous(merged, ours, request.cni_version)
        return merged

    def _attach_all(self, request: Request, rails: Sequence[Request]) -> list[dict[str, Any]]:
        """The result of each rail. The caller has the lock."""
        documents, entries = [], list[JournalEntry]()
        for other in _other_rails(self.journal, Attachment.of(request)):
            self._settle_earlier_attempt(other, request)
        # At the undo the path may be gone. The descriptor keeps the namespace.
        with (
            NetworkNamespace.open(request.netns, request.netns_descriptor) as opened,
            Undo() as undo,
        ):
            for rail in rails:
                rail = replace(rail, netns_descriptor=opened.descriptor)
                documents.append(self.attach(rail, entries.append))
                step = partial(self._remove, Attachment.of(rail), rail)
                undo.register(f'"{rail.ifname}"', step)
            interrupts.hold()  # from here on the call reports success
            for entry in reversed(entries):
                self.journal.write(entry)
        return documents

    def delete(self, request: Request) -> None:
        """Detach all interfaces and release their addresses, the latest first."""
        attachment = Attachment.of(request)
        failures = Failures()
        with explained(), self.journal.locked(attachment):
            for other in _other_rails(self.journal, attachment):
                failures.of(partial(self._remove_rail, other, request))
            self._remove(attachment, _of_first(request))
            if failures:
                raise CNIError(
                    Code.CLEANUP_INCOMPLETE,
                    f"attachment {attachment} is not fully removed, run DEL again: {failures}",
                )

    def check(self, request: Request) -> None:
        """Compare each interface with its ADD."""
        if _rails_of(request) is None:
            super().check(request)
            return
        attachment, previous = Attachment.of(request), results.expected(request).result
        shown = [each.name for each in previous.interfaces if each.sandbox == request.netns]
        with explained(), self.journal.locked(attachment):
            recorded = [rail.ifname for rail in _other_rails(self.journal, attachment)]
            own = {request.ifname, *recorded}
            asked = [name for name in _names(request.ifname, len(shown)) if name in shown]
            for name in dict.fromkeys((*asked, *recorded)):
                rail = replace(attachment, ifname=name)
                entry = self.journal.read(rail)
                if entry is None:
                    raise results.differs(f"podfabric's journal has no entry for {rail}")
                self._check(rail, _check_of(request, entry, own - {name}))

    def gc(self, request: Request) -> None:
        """Remove attachments that are not valid. Each rail is as valid as its first interface."""
        valid = request.config.valid_attachments or ()
        with explained():
            rails = [
                (container_id, rail.ifname)
                for container_id, ifname in valid
                for rail in _other_rails(
                    self.journal, Attachment(request.network, container_id, ifname)
                )
            ]
        request = _of_first(request)
        if rails:
            listed = [{"containerID": cid, "ifname": name} for cid, name in (*valid, *rails)]
            parts = decoding.decode(request.config.raw, dict[str, msgspec.Raw])
            raw = msgspec.Raw(msgspec.json.encode(listed))
            parts |= {key: raw for key in configs.VALID_ATTACHMENTS if key in parts}
            config = configs.decode_for_removal(msgspec.json.encode(parts))
            request = replace(request, config=config)
        super().gc(request)

    def status(self, request: Request) -> None:
        """Raise CNIError 50 if an ADD would fail now."""
        rails = [request]
        if _rails_of(request) is not None:
            try:
                self._require_valid(request)
                rails = _calls(request)
            except CNIError as error:
                raise CNIError(Code.UNAVAILABLE, error.message) from None
        for rail in rails:
            super().status(rail)

    def _complete(self, entry: JournalEntry) -> None:
        interrupts.hold()  # from here on the call reports success
        self.journal.write(entry)

    def _require_valid(self, request: Request) -> None:
        """Raise CNIError 7 for a configuration that rails do not allow."""
        if (written := _rails_of(request)) != ALL:
            raise invalid_config(f'"rails": {written!r} is not "{ALL}": write "{ALL}"')
        if request.cni_version in protocol.FAMILY_020:
            raise invalid_config('"rails" needs several interfaces: set "cniVersion" to "1.0.0"')
        found = [path for path in _OF_ONE_INTERFACE if request.config.at(path, object)]
        given = {"MAC": request.arguments.mac, "IP": request.arguments.ip}
        found += [f"CNI_ARGS {key}" for key, value in given.items() if value]
        if request.config.keys.get("master") not in (None, "", *self.masters):
            found.append("master")
        if found:
            raise invalid_config(
                f'"{found[0]}" is for one interface, but "rails" attaches one on each HCA that the '
                f'pod holds: remove "{found[0]}" or "rails"'
            )

    def _adds(self, request: Request) -> list[Request]:
        """The ADD of each rail. Raises CNIError 120 for a pod without HCAs, 11 if unknown."""
        pod = request.arguments.pod
        try:
            hcas = pod_devices.given_to(self.paths, pod).hcas
        except Unknown as unknown:
            raise CNIError(Code.TRY_AGAIN, str(unknown)) from None
        if not hcas:
            raise none_given(self.paths, pod, f'"{RAILS}": "{ALL}"')
        names = _names(request.ifname, len(hcas))
        if len(os.fsencode(names[-1])) > _LONGEST_NAME:
            raise invalid_config(
                f'"rails": the interface on HCA {hcas[-1].device.id} would be "{names[-1]}", which '
                f"is longer than {_LONGEST_NAME} characters: give this attachment a shorter "
                "interface name"
            )
        calls = _calls(request)
        numbers = _numbers(hcas, len(calls)) if _has_own_addresses(request) else [0] * len(hcas)
        return [
            _named(_configured(call, {**call.config.keys, "deviceID": held.device.id}), name)
            for name, call, held in zip(names, map(calls.__getitem__, numbers), hcas, strict=True)
        ]

    def _remove_rail(self, rail: Attachment, request: Request) -> None:
        entry, damage = self._read(rail)
        if entry is None and damage is None:
            self.journal.remove(rail)  # of an ADD that was killed before its first change
            return
        if entry is not None:
            netns, descriptor = request.netns, request.netns_descriptor
            request = replace(entry.delete_request(), netns=netns, netns_descriptor=descriptor)
        self._remove(rail, _named(_of_first(request), rail.ifname))


def _other_rails(journal: Journal, first: Attachment) -> list[Attachment]:
    """The other attachments of the ADD that made `first`, the latest first. Raises OSError.

    A damaged or unfinished file counts if its name is that of such an attachment.
    """
    rails = []
    for path in journal.files_of(first.container_id):
        try:
            entry = from_bytes(files.read(str(path)), path.name)
        except (FileNotFoundError, JournalDamaged):
            number = path.name.partition(f"-{first.ifname}-")[2].partition("-")[0]
            rail = replace(first, ifname=f"{first.ifname}-{number}")
            if journal.path_of(rail) == path:
                rails.append(rail)
            continue
        if entry.first == first != entry.attachment:
            rails.append(entry.attachment)
    return sorted(rails, key=lambda rail: (len(rail.ifname), rail.ifname), reverse=True)


def _rails_of(request: Request) -> object:
    return rail_keys.written(request.config.keys)


def _has_own_addresses(request: Request) -> bool:
    """Whether "ipam" has an entry for each rail."""
    ipam = request.config.keys.get("ipam")
    return isinstance(ipam, dict) and ipam.get(RAILS) is not None


def _calls(request: Request) -> list[Request]:
    """The call with the configuration of each rail. One for all rails, unless "ipam" has "rails".

    Raises CNIError 7.
    """
    keys = {key: value for key, value in request.config.keys.items() if key != "prevResult"}
    calls = [_configured(request, of_rail) for of_rail in rail_keys.each(keys)]
    if not calls:
        raise invalid_config('"ipam.rails" is empty: add an entry for each rail')
    return [replace(call, rail_of=request.ifname) for call in calls]


def _of_first(request: Request) -> Request:
    """The DEL or GC, with the configuration of the first rail if there are rails."""
    with suppress(CNIError):  # no ADD had success with this configuration
        if request.config.whole and _rails_of(request) is not None:
            return _calls(request)[0]
    return request


def _configured(request: Request, keys: Mapping[str, Any]) -> Request:
    """The call with this configuration, which IPAM plugins also get."""
    return replace(request, config=configs.decode(msgspec.json.encode(keys)))


def _names(ifname: str, count: int) -> list[str]:
    return [ifname, *(f"{ifname}-{number}" for number in range(1, count))]


def _numbers(hcas: Sequence[PodDevice], entries: int) -> Iterator[int]:
    """The entry of "ipam.rails" for each HCA: its rail in config.yaml, or else its position."""
    for position, held in enumerate(hcas):
        number = position if held.device.rail is None else held.device.rail
        if number >= entries:
            raise invalid_config(
                f'"ipam.rails" has {entries} entries, but HCA {held.device.id} is rail {number} '
                "(from 0): add an entry for each rail, or request fewer HCAs"
            )
        yield number


def _named(request: Request, name: str) -> Request:
    environ = {**request.environ, "CNI_IFNAME": name}
    return replace(request, ifname=name, environ=environ)


def _check_of(request: Request, entry: JournalEntry, others: set[str]) -> Request:
    """The CHECK of one rail. Its prevResult has no addresses of other rails."""
    previous = request.config.at("prevResult", dict[str, Any]) or {}
    elsewhere = {
        position
        for position, interface in enumerate(previous.get("interfaces") or ())
        if interface.get("sandbox") and interface.get("name") in others
    }
    ips = [ip for ip in previous.get("ips") or () if ip.get("interface") not in elsewhere]
    keys = configs.decode(entry.config.encode()).keys
    shown = {**previous, "ips": ips}
    return _named(_configured(request, {**keys, "prevResult": shown}), entry.ifname)
