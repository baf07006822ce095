"""nv-ipam's pools in the agent, where it follows or owns them (`ipam.nv_ipam`)."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from agent import cluster_addresses
from base.paths import Paths
from ipam.nv_ipam import options
from ipam.nv_ipam.plugin import NvIpam
from ipam.scope import AddressSettings
from ipam.store_files import StoreFiles

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from ipam.cluster.lessee import Lessee
    from ipam.cluster.nv_ipam.service import NvPoolService, OwnPoolService

_log = logging.getLogger(__name__)


def service_of(
    paths: Paths,
    files: StoreFiles,
    settings: AddressSettings,
    environ: Mapping[str, str] = os.environ,
) -> "NvPoolService | OwnPoolService | None":
    """Follows the pools, or owns them, once it is started; None on a node that does neither.

    None also if no API server is configured: the log says why.
    """
    if settings.nv_ipam == "none":
        return None
    node = environ.get(cluster_addresses.NODE_NAME, "")
    api = cluster_addresses.api_of(environ) if node else None
    if api is None:
        return None
    from ipam.cluster.nv_ipam.service import NvPoolService, OwnPoolService

    try:
        boot = paths.boot_id()
    except OSError as error:
        _log.error("cannot tell which boot this is: %s: %s", error.filename, error.strerror)
        return None
    form = NvPoolService if settings.nv_ipam == "follow" else OwnPoolService
    return form(api, files, node, boot, settings.nv_ipam_namespace)


def plugin_of(
    paths: Paths,
    settings: AddressSettings,
    service: "NvPoolService | OwnPoolService | None",
    lessee: "Lessee | None" = None,
) -> Callable[[], NvIpam | None]:
    """What serves definitions of nv-ipam; None where podfabric does not. `lessee` leases the
    addresses where the pools are its own."""
    if settings.nv_ipam == "none":
        return lambda: None
    conf = options.conf_of(paths.cni_conf)
    if settings.nv_ipam == "follow":
        follows = NvIpam(paths.ipam, conf, service.follower if service is not None else None)
        return lambda: follows
    from ipam.cluster.nv_ipam.own_claims import OwnClaims
    from ipam.nv_ipam.own import OwnNvIpam

    claims = None
    if lessee is not None and service is not None and service.owner is not None:
        claims = OwnClaims(lessee, service.owner.why_not)
    owns = OwnNvIpam(paths.ipam, conf, claims, service.follower if service is not None else None)
    return lambda: owns


def families(
    service: "NvPoolService | OwnPoolService",
) -> Callable[[], "Sequence[Metric]"]:
    """What a scrape shows of the pools that are followed."""
    return lambda: _families(service)


def _families(service: "NvPoolService | OwnPoolService") -> "Sequence[Metric]":
    from prometheus_client.metrics_core import GaugeMetricFamily

    addresses = GaugeMetricFamily(
        "podfabric_nv_ipam_addresses",
        "Addresses of nv-ipam's pools that are this node's, by pool.",
        labels=("pool", "state"),
    )
    for key, state in service.follower.states.items():
        for name in ("usable", "blocked", "outside", "overlap"):
            addresses.add_metric((key, name), getattr(state, name))
    return (addresses,)
