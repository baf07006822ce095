"""Nodes on a real API server whose processes are killed, and machines whose power is lost.

A child process does the work of a node's agent and kills itself with SIGKILL at a chosen point. The
next process begins with the state on disk and on the API server. Both share a clock.
"""

import mmap
import os
import random
import shutil
import signal
import struct
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cni.spec.errors import CNIError
from ipam.addresses import parse
from ipam.leases.block_layout import interval
from ipam.leases.objects import AddressBlock, Holder
from ipam.plugin import AddressPlugin
from ipam.store.sqlite_store import SqliteStore
from ipam.store.store_files import StoreFiles
from ipam.store.tables import Tables
from ipam.store_choice import Stores
from kube.client import ClusterApi
from kube.resources import ApiError
from tests.api.server import ApiServer
from tests.unit.ipam.calls import Json, request
from tests.unit.ipam.leases.audit import audit, instance_of
from tests.unit.ipam.leases.nodes import Clock, ClusterNode

MOST_DROPPED = 10  # commits that a power loss takes
SURVIVED = 3  # the exit code of a child that reached its end

Die = Callable[[], None]
Arm = Callable[["CrashingNode", Die], None]
"""Makes a node's process die at a point of its work."""


class SharedClock(Clock):
    """CLOCK_BOOTTIME of all nodes. It continues in a child."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)
        super().__init__()

    @property
    def now(self) -> float:
        found: float = struct.unpack("d", self._memory[:8])[0]
        return found

    @now.setter
    def now(self, value: float) -> None:
        self._memory[:8] = struct.pack("d", value)


class Objects:
    """The reads of the server that audits need."""

    def __init__(self, api: ClusterApi) -> None:
        self._api = api

    def look_at_all(self, kind: Any, fields: Mapping[str, str] | None = None) -> Any:  # noqa: ANN401
        """All objects of a kind, by a consistent read."""
        return self._api.list(kind, fields)


class CrashingNode(ClusterNode):
    """A node with its own token. `snapshots` are its disk after each of the last commits."""

    def __init__(self, server: ApiServer, directory: Path, name: str, clock: Clock) -> None:
        self.objects = Objects(server.admin)
        self.snapshots = directory.with_name(f"{directory.name}-disk")
        directory.mkdir()
        self.snapshots.mkdir()
        self._api_server = server
        client = server.node(name, machineID=f"m-{name}", systemUUID=f"s-{name}")
        super().__init__(client, directory, name, clock=clock)
        self.server = self.objects  # type: ignore[assignment]

    def restart(self, boot: str = "") -> None:
        """Start a new agent process, with a new client."""
        kubeconfig = self._api_server.plane.directory / f"{self.name}.kubeconfig"
        self.api = self._api_server.client(kubeconfig)  # type: ignore[assignment]
        super().restart(boot)

    def killed_at(self, arm: Arm, work: Callable[["CrashingNode"], None]) -> None:
        """Do `work` in a child, which dies at the point `arm`: by SIGKILL, not by an exception."""
        child = os.fork()
        if child == 0:
            try:
                self.restart()
                self._keep_commits()
                arm(self, _die)
                work(self)
            except (CNIError, ApiError, AssertionError, OSError):
                traceback.print_exc()
            finally:
                os._exit(SURVIVED)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), (
            f"it did not die: exit code {os.waitstatus_to_exitcode(status)}"
        )
        assert os.WTERMSIG(status) == signal.SIGKILL

    def lose_power(self, boot: str) -> None:
        """Power the machine off. Its disk loses some of the last commits. Then boot it."""
        disks = sorted(self.snapshots.iterdir(), key=lambda path: int(path.name))
        kept = random.choice(disks[-1 - MOST_DROPPED :])
        shutil.rmtree(self.directory)
        shutil.copytree(kept, self.directory)
        self.boot = boot

    def plain(self) -> AddressPlugin:
        """The plugin in a process without the agent: it leases nothing and calls no server."""
        stores = Stores(
            StoreFiles(self.directory, report=lambda text: None, kept=False),
            lambda: "cluster",
        )
        return AddressPlugin(stores, lambda: self.boot)

    def delete_plainly(self, pod: str, ipam: Json) -> None:
        """I9: two DELs without the server."""
        for _ in range(2):
            self.plain().delete(request("DEL", ipam, f"{pod}-1", pod=pod))

    def _keep_commits(self) -> None:
        inner, number = self.files.transaction, 0

        def keep() -> None:
            nonlocal number
            new = self.snapshots.with_name(f"{self.snapshots.name}-new")
            shutil.rmtree(new, ignore_errors=True)
            shutil.copytree(self.directory, new)
            new.rename(self.snapshots / str(number))  # a kill leaves no partial copy
            shutil.rmtree(self.snapshots / str(number - MOST_DROPPED - 1), ignore_errors=True)
            number += 1

        @contextmanager
        def transaction() -> Iterator[Tables]:
            with inner() as tables:
                before = tables.meta.seq
                yield tables
                is_changed = tables.meta.seq != before
            if is_changed:
                keep()

        keep()
        self.files.transaction = transaction  # type: ignore[method-assign]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- points ----------------------------------------------------------------------------------


def after_call(verb: str, is_it: Callable[[Any], bool]) -> Arm:
    """The point after the server has executed a call about such an object, before its answer is
    used."""

    def arm(node: CrashingNode, die: Die) -> None:
        call = getattr(node.api, verb)

        def wrapped(resource: Any) -> Any:  # noqa: ANN401 - any object
            answer = call(resource)
            if is_it(resource):
                die()
            return answer

        setattr(node.api, verb, wrapped)

    return arm


def after_commit(verb: str) -> Arm:
    """The point after a transaction of the lessee that changed something."""

    def arm(node: CrashingNode, die: Die) -> None:
        store = node.lessee._store
        call = getattr(store, verb)

        def wrapped(*arguments: Any) -> Any:  # noqa: ANN401 - any verb
            before = store.seq()
            answer = call(*arguments)
            if store.seq() != before:
                die()
            return answer

        setattr(store, verb, wrapped)

    return arm


def after_reservation(node: CrashingNode, die: Die) -> None:
    """The point after the address is reserved, before ADD answers."""
    call = SqliteStore.reserve_seen

    def wrapped(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - any arguments
        grant = call(*arguments, **named)
        if grant.granted:
            die()
        return grant

    SqliteStore.reserve_seen = wrapped  # type: ignore[method-assign]


# --- what must hold --------------------------------------------------------------------------


class Auditor:
    """Checks I1 to I10 of docs/developers/protocol.md for these nodes and the server."""

    def __init__(self, objects: Objects, *nodes: CrashingNode) -> None:
        self._objects = objects
        self._nodes = nodes
        self._holders: dict[tuple[str, int], Holder] = {}

    def check(self) -> None:
        """Check I1 to I4 and I10 by `audit`; I7 and I8 here. `delete_plainly` checks I9."""
        audit(self._objects, self._nodes)  # type: ignore[arg-type]
        blocks = {
            each.metadata.name: each for each in self._objects.look_at_all(AddressBlock).items
        }
        for block in blocks.values():
            key = block.metadata.uid, block.spec.epoch
            known = self._holders.setdefault(key, block.spec.holder)
            assert known == block.spec.holder, f"I8: {block.metadata.name}: {known}"
        for node in self._nodes:
            self._used_is_leased(node, blocks)

    def _used_is_leased(self, node: CrashingNode, blocks: Mapping[str, AddressBlock]) -> None:
        """I7: addresses of pods of this boot are in a block that the server has for their node."""
        own = instance_of(node)
        for held in node.store.reservations():
            if held.boot == node.boot:
                around = [
                    each
                    for each in blocks.values()
                    if interval(each).first <= parse(held.address) <= interval(each).last
                ]
                assert own in {each.spec.holder.instance for each in around}, f"I7: {held.address}"
