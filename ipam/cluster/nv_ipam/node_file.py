"""The file of this node's pools, as the follower changes it: one writer, in one thread."""

from collections.abc import Collection, Mapping, Set
from pathlib import Path

from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam.nv_ipam.pools import NodePool, NodePools, PoolsFile


class NodeFile:
    """`PoolsFile` of the node of that name, for pools whose keys begin with `serves`.

    Reading raises CNIError 5, writing OSError.
    """

    def __init__(self, directory: Path, node: str, serves: str = "") -> None:
        self._file = PoolsFile(directory)
        self._node = node
        self._serves = serves

    def known(self) -> NodePools:
        """What it says; nothing if it is damaged: it is written again, with what the API server
        says."""
        try:
            return self._file.read() or NodePools(is_named=True)
        except CNIError as error:
            if error.code != Code.STORE_DAMAGED:
                raise
            return NodePools(is_named=True)

    def claim(self) -> None:
        """Forget what is of another node, as the disk was copied, and pools that are not served."""
        known = self.known()
        if known.node not in ("", self._node):
            self._file.write(NodePools(node=self._node, is_named=True))
            return
        pools = {key: pool for key, pool in known.pools.items() if key.startswith(self._serves)}
        if pools != known.pools:
            self.write_all(pools, is_named=known.is_named)

    def write(self, key: str, pool: NodePool | None) -> None:
        """Change one pool."""
        known = self.known()
        pools = {name: each for name, each in known.pools.items() if name != key}
        if pool is not None:
            pools[key] = pool
        self.write_all(pools, is_named=known.is_named)

    def write_all(self, pools: Mapping[str, NodePool], *, is_named: bool) -> None:
        """Change all of it, but what is gone."""
        gone = self.known().gone
        self._replace(NodePools(node=self._node, pools=dict(pools), is_named=is_named, gone=gone))

    def missing(self, present: Collection[str]) -> frozenset[str]:
        """The pools that it knows, and that are not `present`. They are remembered."""
        known = self.known()
        overlapping = (key for pool in known.pools.values() for key in pool.overlapping)
        missing = frozenset((*known.gone, *known.pools, *overlapping)) - frozenset(present)
        self._replace(replace(known, gone=tuple(sorted(missing))))
        return missing

    def forget_missing(self, present: Set[str], settled: Set[str]) -> None:
        """Forget them if each pool that is present and served is `settled`: then it knows by itself
        which ones it overlaps."""
        known, served = self.known(), {key for key in present if key.startswith(self._serves)}
        if served and served <= settled & known.pools.keys():
            self._replace(replace(known, gone=()))

    def _replace(self, new: NodePools) -> None:
        if new != self.known():
            self._file.write(new)


def with_lease(pool: NodePool, old: NodePool | None) -> NodePool:
    """The pool with what `old` says of the share and its confirmation."""
    if old is None:
        return pool
    last = {"boot": old.boot, "confirmed": old.confirmed, "max_offline": old.max_offline}
    return replace(pool, share=old.share, **last)
