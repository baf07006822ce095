"""How an interface plugin calls its IPAM plugin: this package in-process, others as a process.

`choose` decides by `ipam.type`; what it answers has the verbs, and `undo` for an ADD that fails
later on.
"""

import os
from pathlib import Path
from typing import Protocol

from cni.spec import delegate, interrupts
from cni.spec.errors import CNIError, Code
from cni.spec.request import Request
from cni.spec.result import Result
from ipam.plugin import AddressPlugin
from ipam.store import Grant

OURS = "podfabric-ipam"
TAKEN_OVER = "whereabouts"
_MARK = b"podfabric"
_MARK_WITHIN = 1 << 20  # bytes of an executable that are searched for it


class Ipam(Protocol):
    """The IPAM plugin of one call. Every method raises CNIError."""

    def add(self, segment: str = "") -> Result:
        """Addresses for the request's attachment, at least one, to be used on that link.

        Whoever has the same `segment` can hear each other; "" is unknown.
        """

    def undo(self) -> None:
        """Take back what `add` of this object did, if it did anything."""

    def delete(self) -> None:
        """Release what the attachment holds."""

    def check(self) -> None:
        """Compare the request's prevResult with what is held."""

    def gc(self) -> None:
        """Release what attachments hold that the request does not list."""

    def status(self) -> None:
        """CNIError 50 or 51 if `add` could not succeed now."""


def choose(ipam_type: str, request: Request, plugin: AddressPlugin) -> Ipam:
    """The IPAM plugin for `ipam.type`.

    Ours is `plugin`, called in-process: "podfabric-ipam", and "whereabouts" where CNI_PATH has no
    executable of that name but links to ours.
    """
    if ipam_type == OURS or (ipam_type == TAKEN_OVER and not _foreign(ipam_type, request)):
        return _InProcess(request, plugin)
    return _Executable(ipam_type, request)


class _InProcess:
    """`podfabric-ipam` without a process."""

    def __init__(self, request: Request, plugin: AddressPlugin) -> None:
        self._request = request
        self._plugin = plugin
        self._grant = Grant()

    def add(self, segment: str = "") -> Result:
        with interrupts.held():
            result, self._grant = self._plugin.reserve(self._request, segment)
        return result

    def undo(self) -> None:
        grant, self._grant = self._grant, Grant()
        if grant.granted:
            self._plugin.undo(grant)

    def delete(self) -> None:
        self._plugin.delete(self._request)

    def check(self) -> None:
        self._plugin.check(self._request)

    def gc(self) -> None:
        self._plugin.gc(self._request)

    def status(self) -> None:
        self._plugin.status(self._request)


class _Executable:
    """Another plugin's executable, looked up in CNI_PATH."""

    def __init__(self, plugin_type: str, request: Request) -> None:
        self._type = plugin_type
        self._request = request
        self._added = False

    def add(self, segment: str = "") -> Result:
        result = delegate.add(self._type, self._request)
        self._added = True
        if not result.ips:
            self.undo()
            raise CNIError(
                Code.DELEGATE,
                f"IPAM plugin returned missing IP config: {self._type} answered ADD without an "
                'address; see its configuration in "ipam"',
            )
        return result

    def undo(self) -> None:
        if self._added:
            self._added = False
            delegate.undo(self._type, self._request)

    def delete(self) -> None:
        delegate.run(self._type, "DEL", self._request)

    def check(self) -> None:
        delegate.run(self._type, "CHECK", self._request)

    def gc(self) -> None:
        delegate.run(self._type, "GC", self._request)

    def status(self) -> None:
        try:
            delegate.find(self._type, self._request.path)
        except CNIError as error:
            raise CNIError(Code.UNAVAILABLE, error.message) from None
        delegate.run(self._type, "STATUS", self._request)


def _foreign(plugin_type: str, request: Request) -> bool:
    """Whether CNI_PATH has an executable of that name that is not ours."""
    try:
        found = delegate.find(plugin_type, request.path)
    except CNIError:
        return False
    if Path(os.path.realpath(found)).name == OURS:
        return False
    try:
        with found.open("rb") as file:
            return _MARK not in file.read(_MARK_WITHIN)
    except OSError:
        return True  # it cannot be read, so it is not one that we put there
