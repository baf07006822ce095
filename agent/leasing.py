"""Makes the lessee, the part of an agent that leases blocks of addresses in the cluster.

Without the API server, an ADD that needs another block fails, and the runtime tries again. Only
this module loads the client of the API server, because the client costs 20 MB.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from base import decoding
from base.paths import Paths
from base.scrape import gauge
from ipam.nv_ipam import translate
from ipam.store.store_files import StoreFiles
from ipam.store_choice import AddressSettings

if TYPE_CHECKING:
    from ipam.leases.lessee import Lessee
    from ipam.nv_ipam.importing import FollowedPools
    from kube.transport import KubernetesApi

NODE_NAME = "NODE_NAME"
KUBECONFIG = "PODFABRIC_KUBECONFIG"

_clients: "WeakSet[KubernetesApi]" = WeakSet()
_log = logging.getLogger(__name__)


def lessee_of(
    paths: Paths,
    files: StoreFiles,
    settings: AddressSettings,
    environ: Mapping[str, str] = os.environ,
) -> "Lessee | None":
    """The lessee, which the caller starts. Returns `None` if `ipam.scope` is not cluster.

    Logs the reason and returns `None` if NODE_NAME is not set or there is no API server.
    """
    if settings.scope != "cluster":
        return None
    node = environ.get(NODE_NAME, "")
    if not node:
        _log.error(
            '"ipam.scope" is cluster, and the environment has no %s: set it to the name of this '
            "machine's Node object (the chart does), or set the scope to node; until then no pod "
            "gets an address of the cluster",
            NODE_NAME,
        )
        return None
    api = api_of(environ)
    if api is None:
        return None
    from ipam.leases.lessee import Lessee

    decoding.build_decoders()  # of the modules imported above
    return Lessee(api, files, node, paths.boot_id())


def pools_of(
    paths: Paths,
    files: StoreFiles,
    settings: AddressSettings,
    environ: Mapping[str, str] = os.environ,
) -> "FollowedPools | None":
    """The follower of nv-ipam's pools.

    Returns `None` if the setting, NODE_NAME or an API server is missing.
    """
    if not settings.nv_ipam:
        with suppress(OSError):
            Path(translate.pools_file(paths.ipam)).unlink()
        return None
    node = environ.get(NODE_NAME, "")
    api = api_of(environ) if node else None
    if api is None:
        return None
    from ipam.nv_ipam.importing import FollowedPools

    return FollowedPools(api, files, node, paths.boot_id(), settings.nv_ipam_namespace)


def api_of(
    environ: Mapping[str, str],
    setting: str = '"ipam.scope" is cluster',
    until_then: str = "no pod gets an address of the cluster",
) -> "KubernetesApi | None":
    """A client of the API server. Returns `None`, and logs the reason, if there is no API server.

    The log line names the `setting` that needs the client, and says what happens without one
    (`until_then`).
    """
    from kube.resources import ApiError
    from kube.transport import KubernetesApi

    kubeconfig, node = environ.get(KUBECONFIG), environ.get(NODE_NAME, "")
    try:
        api = KubernetesApi(
            Path(kubeconfig) if kubeconfig else None, writer="podfabric-agent", node=node
        )
        _clients.add(api)
        return api
    except ApiError as error:
        _log.error(
            "%s, but there is no API server: %s; run the agent in a pod with a service account "
            "(the chart does), or set %s to a kubeconfig; until then %s",
            setting,
            error,
            KUBECONFIG,
            until_then,
        )
        return None


def unreadable() -> Sequence[Metric]:
    """The number of Kubernetes objects that this agent's clients could not decode, as a metric."""
    clients = tuple(_clients)
    if not clients:
        return ()
    from kube.encoding import unreadable_family

    found = (one for api in clients for one in api.unreadable())
    named = {(one.kind, one.metadata.namespace, one.metadata.name): one for one in found}
    return [unreadable_family(named.values())]


def families(lessee: "Lessee") -> Sequence[Metric]:
    counted = lessee.counted()
    confirmed = -1 if counted.confirmed is None else counted.confirmed
    return (
        gauge(
            "podfabric_leased_addresses",
            "Used and free addresses of the blocks that this node leases.",
            ("state",),
            {("used",): counted.used, ("free",): counted.free},
        ),
        gauge(
            "podfabric_lost_addresses",
            "Leased addresses that a lost machine may use (unprobed) or does use (answered).",
            ("state",),
            {("unprobed",): counted.unprobed, ("answered",): counted.answered},
        ),
        GaugeMetricFamily(
            "podfabric_leases_confirmed_seconds",
            "Seconds since the API server last confirmed the leases, -1 before the first time.",
            confirmed,
        ),
        GaugeMetricFamily(
            "podfabric_leased_blocks", "Blocks that this node leases.", counted.blocks
        ),
        CounterMetricFamily(
            "podfabric_lease_claims", "Claims of blocks that this node won.", counted.claims
        ),
        CounterMetricFamily(
            "podfabric_lease_conflicts",
            "Claims of blocks that another node won.",
            counted.conflicts,
        ),
        CounterMetricFamily(
            "podfabric_lease_errors",
            "Requests for leases that the API server refused or did not answer.",
            counted.errors,
        ),
    )
