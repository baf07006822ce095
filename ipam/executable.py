"""`podfabric-ipam` as an executable, which other interface plugins or a runtime start.

It serves one call of an attachment at a time. Our interface plugins hold the attachment's lock
already, and call the `AddressPlugin` directly.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from base import interrupts, locks
from base.interrupts import Terminated
from base.locks import Busy
from cni.spec.attachment import Attachment
from cni.spec.entry import VERSIONS
from cni.spec.errors import CNIError, Code, invalid_config
from cni.spec.request import Request
from cni.spec.result import Result
from ipam.plugin import AddressPlugin
from ipam.store.reservations import Grant


class IpamExecutable:
    """Implements `cni.spec.plugin.Plugin`. `directory` is for the locks."""

    versions: Sequence[str] = VERSIONS

    def __init__(self, addresses: AddressPlugin, directory: Path) -> None:
        self._addresses = addresses
        self._directory = directory

    def add(self, request: Request) -> Result | dict[str, Any]:
        """Reserve addresses and return them. The caller sets them, so they are not probed."""
        if self._addresses.probes_all(request):
            raise invalid_config(
                '"ipam.probe": only the plugins ipoib and sriov probe addresses: remove it'
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
            why = "only ipoib and sriov probe addresses"
            self._addresses.pass_unprobed(request, grant, why)
        return result

    def delete(self, request: Request) -> None:
        """See AddressPlugin.delete."""
        with self._locked(request):
            self._addresses.delete(request)

    def check(self, request: Request) -> None:
        """See AddressPlugin.check."""
        with self._locked(request):
            self._addresses.check(request)

    def gc(self, request: Request) -> None:
        """See AddressPlugin.gc."""
        self._addresses.gc(request)

    def status(self, request: Request) -> None:
        """See AddressPlugin.status."""
        self._addresses.status(request)

    @contextmanager
    def _locked(self, request: Request) -> Iterator[None]:
        attachment = Attachment(request.network, request.container_id, request.ifname)
        path = f"{self._directory}/addresses-{attachment.key}"
        lock = locks.locked(path, f"the addresses of {attachment}")
        try:
            lock.acquire()
        except Busy as busy:
            raise CNIError(Code.TRY_AGAIN, str(busy)) from None
        except OSError as error:
            raise CNIError(
                Code.IO_FAILURE,
                f"cannot lock {path}: {error.strerror}: see that {self._directory} can be "
                "written, by root",
            ) from None
        try:
            interrupts.require_client()
            yield
        finally:
            lock.release()
