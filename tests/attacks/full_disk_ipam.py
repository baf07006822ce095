"""A node whose address store lacks space, descriptors or memory, compared with its answers."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cni.spec.errors import CNIError, Code
from ipam.store import repair
from ipam.store.store_files import StoreFiles
from tests.attacks.full_disk import SmallDisk, small_disk
from tests.unit.ipam.calls import Calls

RANGES = {"ipRanges": [{"range": "10.0.0.0/24"}, {"range": "fd00::/64"}]}
WAYS = ("opened for each call", "kept open")
VERBS = ("ADD", "DEL", "CHECK", "GC", "STATUS")
WRITING = {"ADD", "DEL", "GC"}
FILES = {"lock", "reservations.db"}


class Watched:
    """The verbs of a node. `said` maps each address to its holder according to the answers."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        # It does not use `calls`, because the call under test must open its files.
        before = Calls(StoreFiles(calls.directory, report=silent, kept=False))
        self.said = before.held() if any(calls.directory.glob("*")) else {}
        self.failures: list[CNIError] = []

    def call(self, verb: str, container_id: str) -> bool:
        """Call one verb for an attachment with which it should succeed; returns whether it did."""
        verbs: dict[str, Callable[[str], None]] = {
            "ADD": self._add,
            "DEL": self._delete,
            "CHECK": self._check,
            "GC": self._gc,
            "STATUS": self._status,
        }
        try:
            verbs[verb](container_id)
        except CNIError as error:
            self._require_clear(error)
            self.failures.append(error)
            return False
        return True

    def require_true(self) -> None:
        """Check that the holders of addresses match the answers."""
        assert self.calls.held() == self.said

    def require_that_all_goes_on(self) -> None:
        """With room again, check that every verb works, the store is sound, and no other file is
        left."""
        self.require_true()
        for verb in ("ADD", "CHECK", "STATUS", "DEL", "GC"):
            assert self.call(verb, "later"), self.failures[-1]
            self.require_true()
        self.close_files()
        assert repair.check(self.calls.directory, print)
        assert {path.name for path in self.calls.directory.iterdir()} <= FILES

    def close_files(self) -> None:
        """Close the files of a store that is kept open. The next call opens them again."""
        if isinstance(self.calls.files, StoreFiles) and self.calls.files.kept:
            self.calls.files.close()
            self.calls.files = StoreFiles(self.calls.directory, report=silent)

    def _add(self, container_id: str) -> None:
        result = self.calls.addresses(RANGES, container_id)
        for address in (cidr.partition("/")[0] for cidr in result):
            assert address not in self.said, "it has an owner"
            self.said[address] = container_id

    def _delete(self, container_id: str) -> None:
        self.calls.delete(RANGES, container_id)
        self.said = {
            address: holder for address, holder in self.said.items() if holder != container_id
        }

    def _check(self, container_id: str) -> None:
        ips = [
            {"address": f"{address}/{64 if ':' in address else 24}"}
            for address, holder in self.said.items()
            if holder == container_id
        ]
        previous = {"cniVersion": "1.0.0", "ips": ips}
        self.calls.check(RANGES, container_id, config={"prevResult": previous})

    def _gc(self, container_id: str) -> None:
        """Call GC with everything valid except the container's attachment."""
        valid = {holder for holder in self.said.values() if holder != container_id}
        listed = [{"containerID": holder, "ifname": "eth0"} for holder in sorted(valid)]
        self.calls.gc(RANGES, config={"cni.dev/valid-attachments": listed})
        self.said = {address: holder for address, holder in self.said.items() if holder in valid}

    def _status(self, _: str) -> None:
        self.calls.status(RANGES)

    def _require_clear(self, error: CNIError) -> None:
        assert error.code in (Code.IO_FAILURE, Code.UNAVAILABLE), error
        assert "\n" not in error.message, error
        assert "nothing was changed" in error.message, error
        assert "see that" in error.message or "raise the memory limit" in error.message, error
        json.dumps(error.message)


@contextmanager
def node_on(directory: Path, way: str) -> Iterator[Watched]:
    """A node with its store in `directory`, opened in this way."""
    if way == "opened for each call":
        yield Watched(Calls(directory))
        return
    node = Watched(Calls(StoreFiles(directory, report=silent)))
    try:
        yield node
    finally:
        node.close_files()


@contextmanager
def disk_with_store() -> Iterator[SmallDisk]:
    """A disk; its base is a store with addresses of three pods."""
    with small_disk() as disk:
        calls = Calls(StoreFiles(disk.base, report=silent, kept=False))
        for number in range(3):
            calls.add(RANGES, f"c{number}")
        yield disk


def silent(line: str) -> None:
    """Discard a log line."""
