"""DEL, CHECK, GC and STATUS of `ipoib` and `sriov`, and the undo of a failed ADD.

Each plugin has its own ADD, and its own methods that detach and compare an interface. A removal
detaches the interface first, because another pod may get a released address at once. The journal's
entry goes last. If a step fails, the entry stays for the next DEL.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from typing import ClassVar, TypeVar

import msgspec

from base import interrupts
from base.locks import Busy
from base.paths import Paths
from cni.attachments import node_facts, results
from cni.attachments.journal import Journal, JournalDamaged, JournalEntry, Phase
from cni.attachments.sandbox import lives
from cni.spec.attachment import Attachment
from cni.spec.config import IpamConfig
from cni.spec.entry import VERSIONS
from cni.spec.errors import CNIError, Code
from cni.spec.notes import note
from cni.spec.request import Request
from cni.spec.result import require_convertible
from host import netdev_move
from host.errors import HostError
from host.namespaces import NetworkNamespace
from host.netdev_move import NameTaken
from host.netlink.sockets import Rtnetlink, netlink
from ipam.delegation import Delegation, IpamCall
from ipam.plugin import AddressPlugin
from policy import allowance, rules, stored_policies
from policy.allowance import Allowance

T = TypeVar("T")

ERRORS = (CNIError, HostError, OSError, Busy, JournalDamaged)
"""The expected errors of a step of an ADD or a removal."""


class Undo:
    """Runs the registered steps, the latest first, if an exception leaves the block.

    After a failed step no further step runs, because an interface may still have the address. The
    journal's entry then stays for a DEL.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[str, Callable[[], object]]] = []
        self._last: Callable[[], object] = lambda: None

    def register(self, what: str, step: Callable[[], object]) -> None:
        """Register `step`, which undoes `what`."""
        self._steps.append((what, step))

    def last(self, step: Callable[[], object]) -> None:
        """Register the step that undoes the journal's entry.

        The step runs after all other steps.
        """
        self._last = step

    def __enter__(self) -> "Undo":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            return
        with interrupts.held():
            for what, step in (*reversed(self._steps), ("the journal's entry", self._last)):
                try:
                    step()
                except ERRORS as error:
                    note(f"cannot undo {what}: {error}")
                    return


class Failures:
    """Tries steps, and collects their errors."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def of(self, step: Callable[[], T]) -> T | None:
        """Try a step. Returns the step's value, or `None` if the step fails."""
        try:
            return step()
        except ERRORS as error:
            self._texts.append(str(error))
            return None

    def __bool__(self) -> bool:
        return bool(self._texts)

    def __str__(self) -> str:
        return "; ".join(self._texts)

    def report(self) -> None:
        """Raise HostError if a step failed."""
        if self._texts:
            raise HostError(str(self))


@contextmanager
def explained() -> Iterator[None]:
    """Convert `ERRORS` to CNIError 100, 113, 11 or 5."""
    try:
        yield
    except HostError as error:
        raise CNIError(Code.KERNEL, str(error)) from None
    except JournalDamaged as damage:
        raise CNIError(
            Code.JOURNAL_DAMAGED, f"{damage}: run DEL for this attachment, then ADD again"
        ) from None
    except Busy as error:
        raise CNIError(Code.TRY_AGAIN, str(error)) from None
    except OSError as error:
        raise CNIError(
            Code.IO_FAILURE,
            f"cannot use {error.filename or 'a file'}: {error.strerror}: check that the file "
            "system is mounted, writable and not full, and that podfabric has not reached its "
            "limit of open files",
        ) from None


class Sandbox(msgspec.Struct, frozen=True):
    """A pod's open network namespace, with a route socket on the host and one in the pod."""

    namespace: NetworkNamespace
    host: Rtnetlink
    pod: Rtnetlink

    def require_still_there(self) -> None:
        """Raise CNIError 11 if the namespace was removed. Multus never cancels the pod's ADD."""
        if self.namespace.was_removed():
            raise CNIError(
                Code.TRY_AGAIN,
                f'netns "{self.namespace.path}" was removed while this ADD ran: run ADD again '
                "with the pod's new namespace",
            )


@contextmanager
def sandbox_of(request: Request) -> Iterator[Sandbox]:
    """The sandbox of a request. Raises HostError, NamespaceGone."""
    with (
        NetworkNamespace.open(request.netns, request.netns_descriptor) as namespace,
        netlink() as host,
        netlink(namespace) as pod,
    ):
        namespace.look_at_path()
        yield Sandbox(namespace, host, pod)


class InterfacePlugin(ABC):
    """A CNI plugin on one node. Each attachment is an interface with an entry in the journal."""

    name: ClassVar[str]  # the `plugin` of its journal entries
    versions: Sequence[str] = VERSIONS

    def __init__(
        self,
        paths: Paths,
        addresses: AddressPlugin | None = None,
        policy: rules.Source | None = None,
    ) -> None:
        self.paths = paths
        self._policy = policy or stored_policies.on_node(paths)
        addresses = addresses or node_facts.addresses_of(paths, self._policy)
        self._ipam = Delegation(addresses, paths.cni_bin, self._policy)
        self.journal = Journal(paths)

    @abstractmethod
    def detach(self, attachment: Attachment, request: Request, entry: JournalEntry | None) -> None:
        """Remove or restore the attachment's interface. Skips steps that were done already.

        `entry` is `None` if the journal has no readable entry. Then the request and the interface's
        mark identify the interface. Raises HostError while a dying namespace has the interface.
        """

    @abstractmethod
    def adopt(self, attachment: Attachment, request: Request) -> JournalEntry | None:
        """Write an entry, so that DEL can end an attachment that another project's plugin made.

        Returns `None` if the attachment is not found, or if another attachment has the device.
        Raises HostError.
        """

    @abstractmethod
    def compare(self, attachment: Attachment, request: Request) -> None:
        """Raise CNIError 102 for the first difference between the ADD's settings and the kernel."""

    @abstractmethod
    def require_ready(self, request: Request) -> None:
        """Raise CNIError if an ADD would fail now. Addresses are not checked."""

    def remove_strays(self) -> list[str]:
        """Remove the host's interfaces that have our mark but no attachment. Returns the names."""
        return []

    def delete(self, request: Request) -> None:
        """Detach the interface and release its addresses. Skips steps that were done already."""
        attachment = Attachment.of(request)
        with explained(), self.journal.locked(attachment):
            self._remove(attachment, request)

    def check(self, request: Request) -> None:
        """Compare the ADD's settings with the kernel's, and run the IPAM plugin's CHECK."""
        attachment = Attachment.of(request)
        with explained(), self.journal.locked(attachment):
            self._check(attachment, request)

    def _check(self, attachment: Attachment, request: Request) -> None:
        self.compare(attachment, request)
        entry = self.journal.read(attachment)
        ipam = self._ipam.of(request, added=entry.ipam if entry is not None else IpamConfig())
        if ipam is not None:
            ipam.check()

    def gc(self, request: Request) -> None:
        """Remove this network's attachments that are not listed as valid. Raises CNIError 104."""
        valid = request.config.valid_attachments
        if valid is None:
            note("GC without cni.dev/valid-attachments: nothing is removed")
            return
        failures = Failures()
        ipam_of_adds = []
        with explained():
            for entry in self.journal.entries():
                if isinstance(entry, JournalDamaged):
                    note(f"{entry}")  # its attachment is unknown until a DEL names it
                elif entry.plugin == self.name and entry.network == request.network:
                    ipam_of_adds.append(entry.ipam)
                    if (entry.container_id, entry.ifname) not in valid:
                        failures.of(lambda entry=entry: self.remove_locked(entry))  # type: ignore[misc]
            failures.of(self.remove_strays)
            ipam = self._ipam.of_removal(request, request.config.ipam in ipam_of_adds)
            if ipam is not None:
                failures.of(ipam.gc)
        if failures:
            raise CNIError(Code.CLEANUP_INCOMPLETE, str(failures))

    def status(self, request: Request) -> None:
        """Raise CNIError 50 if an ADD would fail now. The IPAM plugin may raise 50 or 51."""
        try:
            with explained():
                ipam = self._ipam.of(request)
                self.require_ready(request)
        except CNIError as error:
            raise CNIError(Code.UNAVAILABLE, error.message, error.details) from None
        if ipam is not None:
            with explained():
                ipam.status()

    def _allowance(self, request: Request) -> Allowance:
        """The allowance of the request's pod. Raises CNIError 5 or 11 without a readable policy."""
        return allowance.of_pod(self._policy(), request.arguments.pod)

    def _require_possible(self, *, match_device: bool, pf_only: bool = False) -> None:
        """Raise CNIError 121 for options that the policy allows for no pod."""
        allowed = allowance.of_anyone(self._policy())
        allowed.require_match(match_device=match_device, pf_only=pf_only)

    def _ipam_of_add(
        self, request: Request, allowed: Allowance
    ) -> tuple[IpamCall | None, Allowance]:
        """Check all input of an ADD. Returns the IPAM plugin, if any, and the remaining allowance.

        Raises CNIError 121 for denied options, 6 or 7 for an invalid prevResult, and 7 for a result
        that the request's version cannot express.
        """
        ipam, allowed = self._ipam.of_add(request, allowed)
        require_convertible(request.cni_version, has_addresses=ipam is not None)
        results.previous_document(request)
        return ipam, allowed

    @contextmanager
    def _attaching(self, attachment: Attachment, request: Request) -> Iterator[Sandbox]:
        """Lock the attachment, open its sandbox, and remove the remains of a killed ADD.

        For a rail, the caller has the lock. Raises CNIError 103 if the attachment exists, 7 if the
        pod has an interface of that name.
        """
        lock = nullcontext() if request.rail_of else self.journal.locked(attachment)
        with explained(), lock, sandbox_of(request) as sandbox:
            self._settle_earlier_attempt(attachment, request)
            try:
                netdev_move.require_free(sandbox.pod, request.ifname)
            except NameTaken as taken:
                raise CNIError(
                    Code.INVALID_CONFIG, f"{taken}: give this attachment another interface name"
                ) from None
            yield sandbox

    def _settle_earlier_attempt(self, attachment: Attachment, request: Request) -> None:
        """Undo an unfinished, unanswered or orphaned ADD. Raises CNIError 103 for any other ADD."""
        entry = self.journal.read(attachment)
        if entry is None:
            return
        living = entry.phase is Phase.ATTACHED and lives(entry, self.paths.boot_id())
        since = request.unanswered_since
        unseen = since is not None and datetime.fromisoformat(entry.since).timestamp() >= since
        if living and not unseen:
            raise CNIError(
                Code.ALREADY_ATTACHED,
                f'interface "{attachment.ifname}" of container {attachment.container_id} has been '
                f'on network "{attachment.network}" since {entry.since}: run DEL before a new ADD',
            )
        self._remove(attachment, entry.delete_request())

    def _remove(self, attachment: Attachment, request: Request) -> None:
        """Remove an attachment. The caller has the attachment's lock. Raises CNIError 104."""
        failures = Failures()
        entry, damage = self._read(attachment)
        if entry is None and damage is None:
            entry = failures.of(lambda: self.adopt(attachment, request))
        if entry is not None and entry.plugin != self.name:
            raise CNIError(
                Code.CLEANUP_INCOMPLETE,
                f'plugin "{entry.plugin}" made attachment {attachment}, so this DEL removed '
                f'nothing: run DEL of plugin "{entry.plugin}" with the configuration of the '
                "ADD",
            )
        # No kernel state outlives a boot.
        if not failures and (entry is None or entry.boot_id == self.paths.boot_id()):
            failures.of(lambda: self.detach(attachment, request, entry))
        if not failures:  # an address that an interface still has must not go to another pod
            failures.of(lambda: self._release_addresses(request, entry, damage))
        if not failures:
            failures.of(lambda: self._forget(attachment, damage))
        if failures:
            raise CNIError(
                Code.CLEANUP_INCOMPLETE,
                f"attachment {attachment} is not fully removed, run DEL again: {failures}",
            )

    def remove_locked(self, entry: JournalEntry, timeout: float = 10.0) -> None:
        """Remove the attachment of an entry, unless another call has changed the entry."""
        with self.journal.locked(entry.first, timeout):
            if self.journal.read(entry.attachment) == entry:
                self._remove(entry.attachment, entry.delete_request())

    def _read(self, attachment: Attachment) -> tuple[JournalEntry | None, JournalDamaged | None]:
        try:
            return self.journal.read(attachment), None
        except JournalDamaged as damage:
            note(f"{damage}: DEL finds the interface by the request and by the interface's mark")
            return None, damage

    def _release_addresses(
        self, request: Request, entry: JournalEntry | None, damage: JournalDamaged | None
    ) -> None:
        # The entry has the IPAM plugin that the ADD ran. The request may name another plugin.
        if entry is not None and request.config.ipam != entry.ipam:
            request = entry.delete_request()
        added = None if damage is not None else entry is not None
        ipam = self._ipam.of_removal(request, added)
        if ipam is not None:
            ipam.delete()

    def _forget(self, attachment: Attachment, damage: JournalDamaged | None) -> None:
        if damage is not None:
            aside = self.journal.set_aside(attachment)
            note(f"the damaged journal file is kept as {aside}")
        self.journal.remove(attachment)
