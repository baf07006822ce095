"""Follows the blocks that this node leases, to see soon when others ask for a part of one.

What a watch shows is a hint: whoever acts on it reads the block again. The thread ends with its
process: a watch under way cannot be ended from here.
"""

import logging
import threading
from collections.abc import Callable

from base import loops
from ipam.cluster.api import ApiError, ClusterApi, WatchExpired
from ipam.cluster.objects import AddressBlock

LEAST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds between two watches

_LOOP = "following the node's blocks"
_log = logging.getLogger(__name__)


class OwnBlocks:
    """Tells `notice` of each block of an instance of which others want addresses.

    All is known up to `version`, a resource version; "" if that is not known.
    """

    def __init__(
        self, api: ClusterApi, instance: str, notice: Callable[[str], None], version: str = ""
    ) -> None:
        self.instance = instance
        self._api = api
        self._notice = notice
        self._closed = threading.Event()
        self._version = version

    def start(self) -> None:
        """Follow the blocks until `close`."""
        threading.Thread(target=self._run, name="own-blocks", daemon=True).start()

    def close(self) -> None:
        """Tell nothing more."""
        self._closed.set()

    def _run(self) -> None:
        pause = LEAST_PAUSE
        while not self._closed.is_set():
            try:
                self.follow()
                loops.worked(_LOOP)
                pause = LEAST_PAUSE
            except WatchExpired:
                self._version, pause = "", LEAST_PAUSE
            except ApiError as error:
                if not self._closed.is_set():
                    _log.debug("leases: the blocks are not followed: %s", error)
                pause = min(2 * pause, LONGEST_PAUSE)
            except Exception:  # noqa: BLE001 - the outermost edge: a defect must not end the thread
                _log.exception("leases: following the blocks failed")
                loops.failed(_LOOP)
                pause = LONGEST_PAUSE
            self._closed.wait(pause)
        loops.worked(_LOOP)

    def follow(self) -> None:
        """One watch to its end, after a list if nothing is known. ApiError."""
        mine = {"spec.holder.instance": self.instance}
        if not self._version:
            listing = self._api.list(AddressBlock, mine)
            self._version = listing.resource_version
            for block in listing.items:
                self._tell(block)
        for change in self._api.watch(AddressBlock, self._version, mine):
            if self._closed.is_set():
                return
            self._version = change.object.metadata.resource_version
            if change.type != "DELETED":
                self._tell(change.object)

    def _tell(self, block: AddressBlock) -> None:
        if block.spec.cede_wanted:
            self._notice(block.metadata.name)
