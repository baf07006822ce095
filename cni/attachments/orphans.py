"""The sweep: removes attachments without a living sandbox, after a reboot, a kill or a failed DEL.

Without `retryDeleteOnError`, Multus forgets a pod's attachments after the first DEL, even if the
DEL fails. So a failed DEL may be left to the sweep.
"""

import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from base.locks import Busy
from base.loop import StepThread
from cni.attachments.journal import JournalDamaged, JournalEntry, Phase
from cni.attachments.lifecycle import ERRORS, InterfacePlugin, explained
from cni.attachments.sandbox import lives
from cni.spec.errors import CNIError
from ipam.plugin import AddressPlugin

EVERY = 60.0  # seconds

_log = logging.getLogger(__name__)


class Outcome(msgspec.Struct, frozen=True):
    """A removal or a failure of a sweep. `removed` is False for a failure."""

    text: str
    removed: bool = True

    def __str__(self) -> str:
        return self.text


def sweep_all(addresses: AddressPlugin, *plugins: InterfacePlugin) -> tuple[Outcome, ...]:
    """Sweep for each plugin, then release addresses of earlier boots.

    A failed sweep does not stop the sweep for the next plugin. The first error becomes an outcome,
    or is raised if there are no outcomes.
    """
    outcomes: dict[Outcome, None] = {}
    failure: CNIError | None = None
    for plugin in plugins:
        try:
            outcomes |= dict.fromkeys(sweep(plugin))
        except CNIError as error:
            failure = failure or error
    # A node without this directory has no store, and release_stale would make a store.
    if any(plugin.paths.ipam.is_dir() for plugin in plugins):
        try:
            # A power cut may bring back reservations that a DEL had released.
            for stale in addresses.release_stale():
                text = f"released {stale.address} of {stale.holder}: reserved in an earlier boot"
                outcomes[Outcome(text)] = None
        except CNIError as error:
            failure = failure or error
    if failure is not None and not outcomes:
        raise failure
    if failure is not None:
        outcomes[Outcome(f"sweep: {failure}", removed=False)] = None
    return tuple(outcomes)


def sweep(plugin: InterfacePlugin) -> tuple[Outcome, ...]:
    """Remove stray interfaces, and attachments without a living sandbox. Raises CNIError."""
    outcomes: list[Outcome] = []
    with explained():
        boot_id = plugin.paths.boot_id()
        plugin.journal.remove_unfinished()
        for entry in plugin.journal.entries():
            if isinstance(entry, JournalDamaged):
                text = f"{entry}: DEL of its attachment will find the interface by its mark"
                outcomes.append(Outcome(text, removed=False))
            elif entry.plugin == plugin.name:
                outcome = _sweep_entry(plugin, entry, boot_id)
                outcomes += [outcome] if outcome is not None else []
        for name in plugin.remove_strays():
            outcomes.append(Outcome(f'removed stray interface "{name}"'))
    return tuple(outcomes)


def _sweep_entry(plugin: InterfacePlugin, entry: JournalEntry, boot_id: str) -> Outcome | None:
    try:
        if entry.phase is not Phase.ADDING and lives(entry, boot_id):
            return None
        plugin.remove_locked(entry, timeout=0.0)
    except Busy:
        return None  # an ADD or DEL of it is running
    except ERRORS as error:
        return Outcome(f"{entry.attachment}: {error}", removed=False)
    return Outcome(f"removed {entry.attachment}: its sandbox is gone")


class Sweeper(StepThread):
    """Sweeps at once and then every `every` seconds. `close` does not wait for a running sweep.

    Logs each removal and each new failure. Calls `swept` with the numbers of removals and failures.
    """

    def __init__(
        self,
        sweep: Callable[[], Sequence[Outcome]],
        swept: Callable[[int, int], object],
        every: float = EVERY,
    ) -> None:
        super().__init__("sweep", join=0.0)
        self._sweep = sweep
        self._swept = swept
        self._every = every
        self._logged: frozenset[str] | None = None  # `None` before the first sweep
        self.start()

    def step(self) -> float:
        started = time.monotonic()
        outcomes = self._sweep()
        removed = sum(outcome.removed for outcome in outcomes)
        self._swept(removed, len(outcomes) - removed)
        is_first = self._logged is None
        self._log_new([str(outcome) for outcome in outcomes])
        if removed or is_first:
            _log.info("sweep: %d removed in %.1f s", removed, time.monotonic() - started)
        return self._every

    def _failed(self, error: Exception) -> float:
        self._swept(0, 1)
        self._log_new([str(error)], trace=not isinstance(error, CNIError))
        return self._every

    def _log_new(self, texts: Sequence[str], *, trace: bool = False) -> None:
        for text in texts:
            if text not in (self._logged or ()):
                _log.warning("sweep: %s", text, exc_info=trace)
        self._logged = frozenset(texts)
