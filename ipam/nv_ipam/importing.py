"""Keeps the node's pools in a file for ADDs, and imports the reservations of nv-ipam's daemon.

The daemon's store is imported once into each store of the node. The daemon's store does not have
the names of networks. So DEL and CHECK find an imported reservation by container and interface.
"""

import logging
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from base import decoding
from base.files import write_atomically
from base.loop import StepThread
from cni.spec.errors import CNIError, Code
from ipam.addresses import parse, parse_interface, text
from ipam.leases.failures import LoggedFailures
from ipam.nv_ipam.pool_import import NvCIDRPool, NvIPPool, NvPool, node_pool
from ipam.nv_ipam.translate import DOMAIN, NodePool, NodePools, pools_file, read_pools
from ipam.store.reservations import UNNAMED, Reservation
from ipam.store.sqlite_store import SqliteStore
from ipam.store.store_files import StoreFiles
from kube.client import ClusterApi
from kube.informer import Mirror, same
from kube.resources import Meta, Node

STORE = Path("/var/lib/cni/nv-ipam/store")
IMPORT = "import the daemon's store"
LOOK_EVERY = 5.0  # seconds between two steps while a step fails or pools are missing
REST = 60.0  # seconds otherwise; a change of a pool wakes the thread
LABELS_EVERY = 300.0  # seconds between two reads of the Node's labels

_VERSION = 1
_CHECKSUM = re.compile(rb'"checksum":(\d+)')
_FNV_PRIME, _FNV_BASIS = 16777619, 2166136261

_log = logging.getLogger(__name__)


class LabelledNode(Node, frozen=True, kw_only=True):
    metadata: Meta


class _Given(msgspec.Struct, frozen=True):
    container_id: str
    interface_name: str
    ip_address: str
    metadata: dict[str, str]


class _GivenPool(msgspec.Struct, frozen=True):
    entries: dict[str, _Given] | None = None


class _DaemonStore(msgspec.Struct, frozen=True):
    version: int
    checksum: int
    pools: dict[str, _GivenPool] | None


def reservations(source: Path, boot: str) -> list[Reservation]:
    """Raises OSError, and CNIError 6 if the file is damaged, or 11 if the daemon runs."""
    _require_stopped(source.with_name("daemon.sock"))
    content = source.read_bytes()
    try:
        store = decoding.decode(content, _DaemonStore)
        if store.version != _VERSION:
            raise ValueError(
                f"the file has version {store.version}, but podfabric reads version {_VERSION}"
            )
        if _checksum_of(content) != store.checksum:
            raise ValueError("its checksum is wrong")
        pools = (store.pools or {}).values()
        return [_read(each, boot) for pool in pools for each in (pool.entries or {}).values()]
    except (msgspec.MsgspecError, ValueError, KeyError) as error:
        reason = f'an entry has no "{error.args[0]}"' if isinstance(error, KeyError) else error
        raise CNIError(
            Code.DECODING_FAILURE,
            f"cannot import {source} ({reason}): nothing was done; drain this node and delete "
            "the file",
        ) from None


def _read(entry: _Given, boot: str) -> Reservation:
    pod = entry.metadata
    pool = decoding.decode(pod["pool_config_snapshot"], dict[str, Any])
    return Reservation(
        domain=DOMAIN,
        address=text(parse(entry.ip_address)),
        range=str(parse_interface(str(pool["subnet"]))[1]),
        network=UNNAMED,
        container_id=entry.container_id,
        ifname=entry.interface_name,
        namespace=pod.get("pod_namespace", ""),
        pod=pod.get("pod_name", ""),
        uid=pod.get("pod_uuid", ""),
        boot=boot,
        since=int(time.time()),
    )


def _checksum_of(content: bytes) -> int:
    """FNV-1a of the file's content, with the checksum replaced by 0 (pkg/ipam-node/types)."""
    found = _FNV_BASIS
    for byte in _CHECKSUM.sub(b'"checksum":0', content, count=1).rstrip():
        found = (found ^ byte) * _FNV_PRIME & 0xFFFFFFFF
    return found


def _require_stopped(path: Path) -> None:
    """Raise CNIError 11 if the daemon answers at `path`, and OSError if the test fails."""
    with (
        socket.socket(socket.AF_UNIX) as client,
        suppress(FileNotFoundError, ConnectionRefusedError),
    ):
        client.settimeout(5.0)
        client.connect(str(path))
        raise CNIError(
            Code.TRY_AGAIN,
            f"nv-ipam's daemon still answers at {path}: stop the daemon on this node",
        )


class FollowedPools(StepThread):
    """Writes this node's part of the pools into a file. ADDs read the file."""

    def __init__(
        self,
        api: ClusterApi,
        files: StoreFiles,
        node: str,
        boot: str,
        namespace: str,
        daemon_store: Path = STORE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("nv-ipam")
        self._api = api
        self._files = files
        self._node = node
        self._boot = boot
        self._namespace = namespace
        self._daemon_store = daemon_store
        self._clock = clock
        self._labels: Mapping[str, str] = {}
        self._labels_at = -LABELS_EVERY
        self._failures = LoggedFailures("nv-ipam")
        self._new = NodePools()
        self._mirrors = list[Mirror[NvPool]]()
        self.sources = dict[str, Callable[[], Sequence[NvPool] | None]]()  # `None`: not listed

    def start(self) -> None:
        for form in (NvIPPool, NvCIDRPool):
            mirror = Mirror[NvPool](self._api, form, same, self.wake, namespace=self._namespace)
            self._mirrors.append(mirror)
            self.sources[form.KIND.lower()] = mirror.items
        super().start()

    def close(self) -> None:
        self._failures.close()
        for mirror in self._mirrors:
            mirror.close()
        super().close()

    def step(self) -> float:
        try:
            former = read_pools(self._files.directory) or NodePools()
        except CNIError:
            former = NodePools()  # the file is written again
        guarded = self._failures.guarded
        found = {kind: source() for kind, source in self.sources.items()}
        self._new = former
        is_well = guarded(IMPORT, self._import)
        if any(pool.spec.node_selector for pools in found.values() for pool in pools or ()):
            is_well &= guarded("read the Node's labels", self._read_labels)
        pools = {  # of kinds that are not read yet, or not installed
            key: pool
            for key, pool in former.pools.items()
            if found.get(key.partition("/")[0]) is None
        }
        for pool in (each for listed in found.values() for each in listed or ()):
            pools[pool.key] = self._view(pool)
        new = replace(self._new, pools=pools, why=self._failures.why(IMPORT))
        if new != former and not self._ended.is_set():
            path, content = pools_file(self._files.directory), msgspec.json.encode(new)
            is_well &= guarded(f"write {path}", lambda: write_atomically(path, content))
        return REST if is_well and None not in found.values() else LOOK_EVERY

    def _import(self) -> None:
        """Import the daemon's reservations, once into each store of the node."""
        with self._files.transaction() as tables:
            store = tables.meta.store
        if store == self._new.store:
            return
        state = self._daemon_store.parent.parent
        if not state.is_dir():
            raise CNIError(
                Code.IO_FAILURE,
                f"{state} is missing: mount this directory of the node into the agent's pod",
            )
        own = SqliteStore(self._files, self._boot)
        found = list[Reservation]()
        with suppress(FileNotFoundError):
            found = reservations(self._daemon_store, self._boot)
        if self._new.store:  # the old store was lost: holders in the new store keep their addresses
            held = {each.address for each in own.reservations() if each.domain == DOMAIN}
            found = [each for each in found if each.address not in held]
        count = own.load(found)
        _log.info("nv-ipam: imported %d reservations of %s", count, self._daemon_store)
        self._new = replace(self._new, store=store)

    def _read_labels(self) -> None:
        if self._clock() - self._labels_at >= LABELS_EVERY:
            self._labels = self._api.get(LabelledNode, self._node).metadata.labels
            self._labels_at = self._clock()

    def _view(self, pool: NvPool) -> NodePool:
        """The file's entry for a pool. An invalid pool is not usable."""
        network = pool.spec.subnet or pool.spec.cidr
        found = [NodePool(key=pool.key, network=network, usable=False)]
        self._failures.guarded(
            f"use {pool.key}", lambda: found.append(node_pool(pool, self._node, self._labels))
        )
        return found[-1]
