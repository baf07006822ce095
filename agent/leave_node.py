"""Removes podfabric from a node once the node is empty.

`podfabric agent --until-empty` attaches no pod. An empty node has no attachment, no address and no
container with a part of a GPU. After the node has been empty for some seconds, the agent removes
the launchers and podfabric's files. A file records that the removal has begun. If the agent is
killed, the next agent sees this file and finishes the removal.
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from agent import presence
from base import files
from base.files import sync_directory
from base.loop import StepThread
from base.paths import Paths
from base.problems import Problems
from cni.attachments.journal import Journal
from cni.spec.errors import CNIError
from deviceplugin import checkpoint
from deviceplugin.checkpoint import CheckpointDamaged, CheckpointUnreadable
from host import mounts
from ipam.store.sqlite_store import SqliteStore
from ipam.store.store_files import StoreFiles

LOOK_EVERY = 1.0  # seconds
TRY_AGAIN = 5.0  # seconds after files could not be removed
STANDING_BY = "standing by"
GONE = "the node has no attachment, and podfabric's launchers and files are removed"
_BEGUN = "removal-has-begun"

_log = logging.getLogger(__name__)


def gpu_holders(paths: Paths) -> int:
    """The number of containers that have parts of GPUs with limits.

    Returns 1 if the checkpoint cannot be read but may be intact, and 0 if it is damaged.
    """
    try:
        allocations = checkpoint.read(paths).allocations
    except CheckpointUnreadable:
        return 1
    except CheckpointDamaged:  # a running device plugin replaces the file
        return 0
    given = ((entry.resource, entry.gpu) for entry in allocations if entry.gpu is not None)
    return len({(resource, gpu.slot) for resource, gpu in given if gpu.slot})


class Leaving(NamedTuple):
    """How an agent leaves its node.

    The agent leaves once the node has been empty for `quiet` seconds. `uninstall` removes
    podfabric's executables from a directory, and yields a line of text for each executable.
    """

    quiet: float
    uninstall: Callable[[Path], Iterable[str]]


class Departure(StepThread):
    """A thread that watches whether the node is empty, until `close`.

    The thread calls `tell` with the state as a text. It calls `stop` when the node is empty, or
    when another agent waits to attach pods.
    """

    def __init__(
        self,
        paths: Paths,
        quiet: float,
        store: StoreFiles,
        tell: Callable[[str], object],
        stop: Callable[[], object],
    ) -> None:
        super().__init__("departure", join=None)
        self.empty = False
        self._paths = paths
        # The removal begins when the node is empty. Files of the store may be gone.
        self._begun = removal_has_begun(paths)
        self._quiet = 0.0 if self._begun else quiet
        self._store = store
        self._tell = tell
        self._stop = stop
        self._empty_since: float | None = None
        self._logged = ""
        self.start()

    def step(self) -> float:
        if presence.others(self._paths.run, STANDING_BY):
            _log.info("another agent stands by and attaches pods: that agent takes over")
            return self._over()
        now = time.monotonic()
        try:
            text = "" if self._begun else left(self._paths, self._store)
        except CNIError as error:
            text = f"addresses that cannot be counted ({error})"
        except OSError as error:  # the next step counts again
            text = f"attachments that cannot be counted ({error})"
        state = f"serving until empty: {text or 'nothing'} left"
        self._tell(state)
        if state != self._logged:
            _log.info("%s", state)
            self._logged = state
        if text:
            self._empty_since = None
        elif self._empty_since is None:
            self._empty_since = now
        elif now - self._empty_since >= self._quiet:
            self.empty = True
            return self._over()
        return LOOK_EVERY

    def _over(self) -> float:
        self._ended.set()
        self._stop()
        return 0.0


def left(paths: Paths, store: StoreFiles) -> str:
    """The numbers of attachments, addresses and containers on the node, as a text.

    Returns "" if the node is empty. A damaged journal file counts as an attachment. Raises CNIError
    if the address store cannot be read.
    """
    attachments = sum(1 for _ in Journal(paths).entries())
    addresses = 0
    if paths.ipam.is_dir():
        boot = paths.boot_id()
        reservations = SqliteStore(store, boot).reservations()
        addresses = sum(reservation.boot == boot for reservation in reservations)
    parts = (
        (attachments, "attachment", "attachments"),
        (addresses, "address", "addresses"),
        (gpu_holders(paths), "container with limits of a GPU", "containers with limits of a GPU"),
    )
    return ", ".join(
        f"{count} {one if count == 1 else many}" for count, one, many in parts if count
    )


def removal_has_begun(paths: Paths) -> bool:
    """Whether a removal of podfabric's files has begun and not ended."""
    return (paths.state / _BEGUN).exists()


def remove(
    paths: Paths, uninstall: Callable[[Path], Iterable[str]], over: Callable[[], bool]
) -> None:
    """Remove launchers and files. Tries again after a failure, until `over` returns true.

    The caller has closed the address store and holds the agent's lock, which is removed last.
    """
    problems = Problems(_log)
    while not over():
        try:
            (paths.state / _BEGUN).touch(mode=0o600)
            sync_directory(paths.state)
            if paths.cni_bin.is_dir():
                for line in uninstall(paths.cni_bin):
                    _log.info("%s", line)
            remove_state(paths)
            paths.agent_lock.unlink(missing_ok=True)
        except OSError as error:
            problems.tell(f"cannot remove {error.filename}", f"{error.strerror} (tried again)")
            time.sleep(TRY_AGAIN)
        else:
            return


def remove_state(paths: Paths) -> None:
    """Remove podfabric's files except the agent's lock. Removes `_BEGUN` last. Raises OSError."""
    begun = paths.state / _BEGUN
    # A container with a part of a GPU keeps its mounts of these two directories.
    gpu = (paths.shims.parent, paths.run / "gpu")
    for directory in (paths.attachments, paths.devices, paths.ipam, *gpu):
        _remove(directory)
    files.remove(paths.cluster_policies)
    for path in (paths.agent_socket, paths.locks):
        _remove(path)
    presence.remove_dead(paths.run)
    sync_directory(paths.state)
    begun.unlink(missing_ok=True)
    sync_directory(paths.state)


def remove_directories(paths: Paths) -> None:
    """Remove podfabric's directories if they are empty. Mount points stay."""
    for directory in (paths.state, paths.run):
        with suppress(OSError):
            directory.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        if mounts.below(path):  # regions of groups (gpu/limits/region_tmpfs.py)
            mounts.in_host(lambda: mounts.unmount_below(path))
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
