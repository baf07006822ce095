"""Follows nv-ipam's pools in the agent: a watch for each kind, and the follower that they wake.

While other machines block a part of a pool, there is one of its shares, too.
"""

from pathlib import Path
from typing import cast

from cni.spec.errors import CNIError
from ipam.cluster.api import ClusterApi
from ipam.cluster.controller.mirror import Mirror
from ipam.cluster.nv_ipam.follower import PoolFollower
from ipam.cluster.nv_ipam.leased_beside import LeasedBeside
from ipam.cluster.nv_ipam.neighbours import SharesWatch
from ipam.cluster.nv_ipam.objects import NvCIDRPool, NvIPPool, NvPool
from ipam.cluster.nv_ipam.owner import PoolOwner
from ipam.cluster.objects import AddressShare
from ipam.cluster.until_closed import UntilClosed
from ipam.confirmed import boottime
from ipam.nv_ipam import importing
from ipam.nv_ipam.pools import ROUTED
from ipam.store_files import StoreFiles


class NvPoolService:
    """The pools of nv-ipam's namespace, for the node `node` in this `boot`.

    Nothing is asked before `start`.
    """

    owner: None = None

    def __init__(
        self, api: ClusterApi, files: StoreFiles, node: str, boot: str, namespace: str
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._ippools: Mirror[NvIPPool] | None = None
        self._cidrpools: Mirror[NvCIDRPool] | None = None
        self._calls = UntilClosed(api)
        calls = cast(ClusterApi, self._calls)
        sources = (lambda: _seen(self._ippools), lambda: _seen(self._cidrpools))
        self.follower = PoolFollower(
            calls,
            files,
            node,
            boot,
            sources,
            self._watched,
            leases=LeasedBeside(calls, namespace, boottime, follows=True),
        )

    def start(self) -> None:
        """Follow until `close`, in threads of its own."""
        wake, where = self.follower.wake, self._namespace
        self._ippools = Mirror(self._api, NvIPPool, wake, namespace=where)
        self._cidrpools = Mirror(self._api, NvCIDRPool, wake, namespace=where)
        self.follower.start(self._calls)

    def _watched(self, key: str) -> SharesWatch:
        return Mirror(self._api, AddressShare, self.follower.wake, fields={"spec.pool": key})

    def close(self) -> None:
        """Begin nothing more, no call either. Waits for a change that is under way, for a while. No
        answer to a read is waited for, as none may come for long."""
        self._calls.close()
        for mirror in (self._ippools, self._cidrpools):
            if mirror is not None:
                mirror.close()
        self.follower.close()


class OwnPoolService:
    """nv-ipam's pools in that namespace as podfabric's own, for the node `node` in this `boot`.

    It leases addresses of IPPools, and has a prefix of each CIDRPool: the entries that podfabric's
    controller gives are followed as those of nv-ipam's. Nothing is asked before `start`.
    """

    def __init__(
        self,
        api: ClusterApi,
        files: StoreFiles,
        node: str,
        boot: str,
        namespace: str,
        daemon_store: Path = importing.STORE,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._ippools: Mirror[NvIPPool] | None = None
        self._cidrpools: Mirror[NvCIDRPool] | None = None
        self._calls = UntilClosed(api)
        calls = cast(ClusterApi, self._calls)
        self.owner = PoolOwner(
            calls,
            files,
            node,
            boot,
            lambda: self._ippools.items() if self._ippools is not None else None,
            daemon_store,
            routed=lambda: self._cidrpools.items() if self._cidrpools is not None else None,
        )
        self.follower = PoolFollower(
            calls,
            files,
            node,
            boot,
            (lambda: _seen(self._ippools), lambda: _seen(self._cidrpools)),
            self._watched,
            serves=ROUTED,
            why_not=lambda: why_not_joined(daemon_store, files),
            leases=LeasedBeside(calls, namespace, boottime),
        )

    def start(self) -> None:
        """Keep the node's part up to date until `close`, in threads of its own."""
        where = self._namespace
        self._ippools = Mirror(self._api, NvIPPool, self._wake, namespace=where)
        self._cidrpools = Mirror(self._api, NvCIDRPool, self._wake, namespace=where)
        self.owner.start(self._calls)
        self.follower.start(self._calls)

    def _wake(self) -> None:
        # Pools of either kind may overlap those of the other.
        self.owner.wake()
        self.follower.wake()

    def _watched(self, key: str) -> SharesWatch:
        return Mirror(self._api, AddressShare, self.follower.wake, fields={"spec.pool": key})

    def close(self) -> None:
        """Begin nothing more, no call either. Waits for a change that is under way, for a while. No
        answer to a read is waited for, as none may come for long."""
        self._calls.close()
        for mirror in (self._ippools, self._cidrpools):
            if mirror is not None:
                mirror.close()
        self.owner.close()
        self.follower.close()


def why_not_joined(daemon_store: Path, files: StoreFiles) -> str | None:
    """Why the store may lack what nv-ipam's daemon gave to pods; None if it has that all."""
    try:
        with files.transaction() as tables:
            store = tables.meta.store
    except CNIError as error:
        return error.message
    return importing.why_unfinished(daemon_store, files.directory, store)


def _seen(mirror: Mirror[NvIPPool] | Mirror[NvCIDRPool] | None) -> tuple[NvPool, ...] | None:
    return None if mirror is None else mirror.items()
