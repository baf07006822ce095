"""Calls the IPAM plugin of an interface plugin: ours in this process, any other in a new process.

`Delegation` chooses the IPAM plugin by `ipam.type`.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from base import interrupts
from base.pod import Pod
from cni.spec import delegate
from cni.spec.config import SERVED, IpamConfig
from cni.spec.errors import CNIError, Code, invalid_config
from cni.spec.notes import note
from cni.spec.request import Request
from cni.spec.result import Result
from ipam import address_policy
from ipam.addresses import parse
from ipam.plugin import AddressPlugin
from ipam.store.reservations import AddressInUse, Grant
from policy import rules
from policy.allowance import Allowance, of_anyone, of_pod

OURS, *TAKEN_OVER = SERVED
"""Our plugin has the type OURS. It serves a type in TAKEN_OVER if no other plugin is installed."""
_NONE = IpamConfig()
_MOST_ANSWERED = 32  # most addresses in use by other machines that one ADD skips
_MARK = b"podfabric"
_MARK_WITHIN = 1 << 20  # bytes of an executable that are searched for the mark


class InProcess:
    """One call of `podfabric-ipam` in this process. Every method raises CNIError."""

    def __init__(
        self, request: Request, plugin: AddressPlugin, allowance: Allowance | None = None
    ) -> None:
        self._request = request
        self._plugin = plugin
        self._allowance = allowance
        self._segment: str | None = None
        self._answered: set[int] = set()
        self._grant = Grant()

    def add(self, segment: str | None = None, allowance: Allowance | None = None) -> Result:
        """Reserve addresses on the link `segment`; "" is an unknown link. Without `allowance`, the
        constructor's allowance applies."""
        self._segment, self._allowance = segment, allowance or self._allowance
        with interrupts.held():
            result, self._grant = self._plugin.reserve(
                self._request, segment, self._allowance, self._answered
            )
        return result

    @property
    def unprobed(self) -> Sequence[str]:
        """Addresses that the caller must probe, because another machine may use them."""
        return self._grant.unprobed

    def settle_probes(self, answers: Mapping[str, str]) -> Result | None:
        """Record the probes. `answers` has the hardware addresses that answered, by IP address.

        Returns `None` if no machine answered. Otherwise reserves and returns other addresses to
        probe, or raises CNIError 11.
        """
        try:
            self._plugin.settle_probes(self._request, self._grant, answers)
        except AddressInUse as error:
            self._answered.update(map(parse, answers))
            if not self._plugin.probes_all(self._request) or len(self._answered) > _MOST_ANSWERED:
                raise
            self.undo()
            try:
                return self.add(self._segment)
            except CNIError as none_left:
                note(f"found no other address to reserve: {none_left}")
                raise error from None
        return None

    def pass_unprobed(self, why: str) -> None:
        self._plugin.pass_unprobed(self._request, self._grant, why)

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
        """Raise CNIError 50 or 51 if an ADD would fail now."""
        self._plugin.status(self._request)


class ForeignIpam:
    """One call of another IPAM plugin's executable. The returned addresses are not probed."""

    unprobed: Sequence[str] = ()

    def __init__(self, plugin_type: str, directory: Path, request: Request) -> None:
        self._type = plugin_type
        self._directory = directory
        self._request = request
        self._added = False

    def add(self, segment: str | None = None, allowance: Allowance | None = None) -> Result:
        result = delegate.add(self._type, self._directory, self._request)
        self._added = True
        try:
            if allowance is not None:  # the addresses are unknown before ADD
                address_policy.of_answer(allowance, self._type, result)
            if not result.ips:
                raise CNIError(
                    Code.DELEGATE,
                    f"IPAM plugin returned missing IP config: {self._type} answered ADD "
                    'without an address: correct the configuration in "ipam"',
                )
        except CNIError:
            self.undo()
            raise
        return result

    def settle_probes(self, answers: Mapping[str, str]) -> None:
        pass

    def pass_unprobed(self, why: str) -> None:
        pass

    def undo(self) -> None:
        if self._added:
            self._added = False
            delegate.undo(self._type, self._directory, self._request)

    def delete(self) -> None:
        self._run("DEL")

    def check(self) -> None:
        self._run("CHECK")

    def gc(self) -> None:
        self._run("GC")

    def status(self) -> None:
        try:
            delegate.find(self._type, self._directory)
        except CNIError as error:
            raise CNIError(Code.UNAVAILABLE, error.message) from None
        self._run("STATUS")

    def _run(self, command: str) -> None:
        delegate.run(self._type, self._directory, command, self._request)


IpamCall = InProcess | ForeignIpam


class Delegation:
    """The IPAM plugins of one node: our `plugin`, and other executables in `directory`.

    Other plugins run only if `policy` allows their type and the paths in their options.
    """

    def __init__(self, plugin: AddressPlugin, directory: Path, policy: rules.Source) -> None:
        self._plugin = plugin
        self._directory = directory
        self._policy = policy

    def of_add(self, request: Request, allowance: Allowance) -> tuple[IpamCall | None, Allowance]:
        """The plugin, if any, and the remaining allowance. Raises CNIError 121 if forbidden."""
        config = request.config.ipam
        _require_plain(config)
        if not config.type:
            return None, allowance
        if self._is_ours(config.type, request):
            allowance = self._plugin.permitted(request, allowance)
            return InProcess(request, self._plugin, allowance), allowance
        allowance = require_allowed(config, allowance)
        return ForeignIpam(config.type, self._directory, request), allowance

    def of(self, request: Request, *, added: IpamConfig = _NONE) -> IpamCall | None:
        """The IPAM plugin of a CHECK or STATUS. Raises CNIError 121 if no pod may use the plugin.
        The configuration `added`, which an ADD checked, is not checked again."""
        config = request.config.ipam
        if config != added:
            _require_plain(config)
        if not config.type or self._is_ours(config.type, request):
            return InProcess(request, self._plugin) if config.type else None
        if config != added:
            require_allowed(config, of_anyone(self._policy()))
        return ForeignIpam(config.type, self._directory, request)

    def of_removal(self, request: Request, added: bool | None) -> IpamCall | None:
        """The IPAM plugin for a DEL or a GC; `None` if the plugin has nothing to release.

        `added` says whether the journal has an ADD with this configuration. `None` means that the
        journal is damaged. DEL and GC run the plugin of the ADD, even if the rules no longer allow
        the plugin. Without an ADD, a forbidden or missing plugin has nothing to release. Raises
        CNIError if the journal is damaged and the plugin is forbidden or missing.
        """
        config = request.config.ipam
        if added or not config.type:
            return self.of(request, added=config)
        try:
            if self._is_ours(config.type, request):
                return InProcess(request, self._plugin)
            _require_plain(config)
            require_allowed(config, self._allowance(request))
            delegate.find(config.type, self._directory)
        except CNIError as error:
            if added is None:
                raise
            note(f'IPAM plugin "{config.type}" was not called, because no ADD called it: {error}')
            return None
        return ForeignIpam(config.type, self._directory, request)

    def _allowance(self, request: Request) -> Allowance:
        """The pod's allowance. A GC, or a DEL of an unknown pod, uses a pod without a name."""
        pod = Pod()
        if request.command == "DEL":
            with suppress(CNIError):
                pod = request.arguments.pod
        return of_pod(self._policy(), pod)

    def _is_ours(self, ipam_type: str, request: Request) -> bool:
        """Whether our plugin serves the type. Raises CNIError 101 if another project's plugin is in
        CNI_PATH, but not in the agent's directory."""
        if ipam_type not in TAKEN_OVER:
            return ipam_type == OURS
        here = self._directory / ipam_type
        if here.is_file():
            return _is_own(here)
        for directory in request.path:
            elsewhere = Path(directory) / ipam_type
            if elsewhere.is_file() and not _is_own(elsewhere):
                # That plugin may keep cluster-wide reservations, which this node cannot read.
                raise CNIError(
                    Code.DELEGATE,
                    f'"ipam.type": "{ipam_type}" names {elsewhere}, but the agent runs '
                    f"plugins only from {self._directory}: set PODFABRIC_CNI_BIN of the agent to "
                    f"{directory} to run this plugin, or delete {elsewhere} to let podfabric "
                    "serve this type",
                )
        return True


def require_allowed(config: IpamConfig, allowance: Allowance) -> Allowance:
    """The remaining allowance. Raises CNIError 121 if no rule allows the type or a path."""
    remaining = address_policy.of_type(allowance, config.type)
    address_policy.of_paths(config.options, allowance)
    return remaining


def _require_plain(config: IpamConfig) -> None:
    if config.ambiguous is not None:
        raise invalid_config(
            f'the key "{config.ambiguous}" occurs twice, or differs from a documented key only in '
            "upper and lower case: write the key once, as documented"
        )


def _is_own(path: Path) -> bool:
    try:
        if Path(os.path.realpath(path)).name == OURS:
            return True
        with path.open("rb") as file:
            return _MARK in file.read(_MARK_WITHIN)
    except OSError:
        return False  # another project's: ours are readable
