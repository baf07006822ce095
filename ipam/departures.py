"""Attachments that whereabouts' objects know: what a DEL leaves to be done on the API server.

Files beside the store, one for each attachment. A `held` one says that an attachment of ours has an
entry there, and is written before the entry is. A DEL makes it a `departed` one; so does the DEL of
a sandbox that whereabouts set up, of which our store knows nothing. The agent removes the entry and
then the file: with the API server away a DEL succeeds, and what it owes is not forgotten.
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from base import decoding
from base.files import remove, sync_directory, write_atomically
from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError, Code

HELD, DEPARTED = ".held", ".departed"
DIRECTORY = "whereabouts"
_REMEDY = (
    "what it owes stays with whereabouts: remove the entry there by hand "
    "(`podfabric ipam compat` lists them), then the file"
)

_log = logging.getLogger(__name__)


class DepartedAttachment(msgspec.Struct, frozen=True, kw_only=True):
    """An attachment. `ranges` are domain and network of those of its configuration; none if that
    cannot be read, which means all. `reserved` are addresses that have a reservation with
    whereabouts, each with its network name."""

    network: str
    container_id: str
    ifname: str
    namespace: str = ""
    pod: str = ""
    ranges: tuple[tuple[str, str], ...] = ()
    reserved: tuple[tuple[str, str], ...] = ()

    @property
    def attachment(self) -> Attachment:
        """The attachment as the runtime knows it."""
        return Attachment(self.network, self.container_id, self.ifname)

    @property
    def podref(self) -> str:
        """The pod as whereabouts writes it."""
        return f"{self.namespace}/{self.pod}"


class Departures:
    """The files below a store's `directory`. Each method raises CNIError 5."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / DIRECTORY
        self._damaged: set[Path] = set()

    def is_held(self, attachment: Attachment) -> bool:
        """Whether the attachment has an entry: one stat."""
        return os.path.exists(self._path(attachment, HELD))  # noqa: PTH110 - each DEL asks

    def reserved_of(self, attachment: Attachment) -> tuple[tuple[str, str], ...]:
        """The addresses that may have a reservation for the attachment since an earlier `hold`."""
        former = self._read(Path(self._path(attachment, HELD)))
        return () if former is None else former.reserved

    def hold(self, departure: DepartedAttachment) -> None:
        """An entry or reservations will be written for the attachment, beside its former ones."""
        former = self._read(Path(self._path(departure.attachment, HELD)))
        self._write(_with(departure, former), HELD)

    def depart(self, departure: DepartedAttachment) -> None:
        """The attachment is gone: its entry is to be removed. A runtime may say so again, before
        that is done, or after another ADD: what was to be removed still is."""
        held = self._path(departure.attachment, HELD)
        former = self._read(Path(self._path(departure.attachment, DEPARTED)))
        if former is not None:
            last = self._read(Path(held))
            self._write(_with(last or departure, former), DEPARTED)
            try:
                remove(held)
            except OSError as error:
                raise _failure(error) from None
            return
        try:
            os.replace(held, self._path(departure.attachment, DEPARTED))  # noqa: PTH105
            sync_directory(self._directory)
        except FileNotFoundError:
            self._write(departure, DEPARTED)
        except OSError as error:
            raise _failure(error) from None

    def held(self) -> Iterator[DepartedAttachment]:
        """Those that have an entry."""
        return self._all(HELD)

    def departed(self) -> Iterator[DepartedAttachment]:
        """Those whose entry is to be removed."""
        return self._all(DEPARTED)

    def settle(self, departure: DepartedAttachment) -> None:
        """Nothing is left to do for it, unless another DEL has added to it meanwhile."""
        path = self._path(departure.attachment, DEPARTED)
        if self._read(Path(path)) not in (None, departure):
            return
        try:
            remove(path)
        except OSError as error:
            raise _failure(error) from None

    def _write(self, departure: DepartedAttachment, state: str) -> None:
        path = self._path(departure.attachment, state)
        try:
            write_atomically(path, msgspec.json.encode(departure))
        except OSError as error:
            raise _failure(error) from None

    def _all(self, state: str) -> Iterator[DepartedAttachment]:
        try:
            paths = sorted(self._directory.glob(f"*{state}"))
        except OSError as error:
            raise _failure(error) from None
        for path in paths:
            found = self._read(path)
            if found is not None:
                yield found

    def _read(self, path: Path) -> DepartedAttachment | None:
        """What a file says; None without one. A damaged one counts as missing, and is told once."""
        try:
            return decoding.decode(path.read_bytes(), DepartedAttachment)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            if path not in self._damaged:
                _log.warning("%s is damaged: %s: %s", path, error, _REMEDY)
                self._damaged.add(path)
            return None

    def _path(self, attachment: Attachment, state: str) -> str:
        return f"{self._directory}/{attachment.key}{state}"


def _with(departure: DepartedAttachment, former: DepartedAttachment | None) -> DepartedAttachment:
    """The attachment with what an earlier file says that it has, too."""
    if former is None:
        return departure
    return msgspec.structs.replace(
        departure,
        ranges=tuple(dict.fromkeys((*former.ranges, *departure.ranges))),
        reserved=tuple(dict.fromkeys((*former.reserved, *departure.reserved))),
    )


def _failure(error: OSError) -> CNIError:
    return CNIError(
        Code.IO_FAILURE,
        f"cannot keep what is to be removed from whereabouts' objects: {error}: free space and "
        "see that the directory is writable; the runtime tries again",
    )
