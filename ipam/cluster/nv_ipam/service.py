"""Follows nv-ipam's pools in the agent: a watch for each kind, and the follower that they wake.

While other machines block a part of a pool, there is one of its shares, too.
"""

from pathlib import Path

from ipam.cluster.api import ClusterApi
from ipam.cluster.controller.mirror import Mirror
from ipam.cluster.nv_ipam.follower import PoolFollower
from ipam.cluster.nv_ipam.neighbours import SharesWatch
from ipam.cluster.nv_ipam.objects import NvCIDRPool, NvIPPool, NvPool
from ipam.cluster.nv_ipam.owner import PoolOwner
from ipam.cluster.objects import AddressShare
from ipam.nv_ipam import importing
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
        sources = (lambda: _seen(self._ippools), lambda: _seen(self._cidrpools))
        self.follower = PoolFollower(api, files, node, boot, sources, self._watched)

    def start(self) -> None:
        """Follow until `close`, in threads of its own."""
        wake, where = self.follower.wake, self._namespace
        self._ippools = Mirror(self._api, NvIPPool, wake, namespace=where)
        self._cidrpools = Mirror(self._api, NvCIDRPool, wake, namespace=where)
        self.follower.start()

    def _watched(self, key: str) -> SharesWatch:
        return Mirror(self._api, AddressShare, self.follower.wake, fields={"spec.pool": key})

    def close(self) -> None:
        """Begin nothing more. Waits for what is under way."""
        for mirror in (self._ippools, self._cidrpools):
            if mirror is not None:
                mirror.close()
        self.follower.close()


class OwnPoolService:
    """nv-ipam's IPPools in that namespace, whose addresses podfabric leases, for the node `node` in
    this `boot`.
    Nothing is asked before `start`."""

    follower: None = None

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
        self.owner = PoolOwner(
            api,
            files,
            node,
            boot,
            lambda: self._ippools.items() if self._ippools is not None else None,
            daemon_store,
        )

    def start(self) -> None:
        """Keep the node's part up to date until `close`, in threads of its own."""
        self._ippools = Mirror(self._api, NvIPPool, self.owner.wake, namespace=self._namespace)
        self.owner.start()

    def close(self) -> None:
        """Begin nothing more. Waits for what is under way."""
        if self._ippools is not None:
            self._ippools.close()
        self.owner.close()


def _seen(mirror: Mirror[NvIPPool] | Mirror[NvCIDRPool] | None) -> tuple[NvPool, ...] | None:
    return None if mirror is None else mirror.items()
