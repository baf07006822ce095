"""nv-ipam's pools in the agent, where it follows them (`ipam.nv_ipam`)."""

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

    from ipam.cluster.nv_ipam.service import NvPoolService

_log = logging.getLogger(__name__)


def service_of(
    paths: Paths,
    files: StoreFiles,
    settings: AddressSettings,
    environ: Mapping[str, str] = os.environ,
) -> "NvPoolService | None":
    """Follows the pools once it is started; None on a node that does not follow them.

    None also if no API server is configured: the log says why.
    """
    if settings.nv_ipam != "follow":
        return None
    node = environ.get(cluster_addresses.NODE_NAME, "")
    api = cluster_addresses.api_of(environ) if node else None
    if api is None:
        return None
    from ipam.cluster.nv_ipam.service import NvPoolService

    try:
        boot = paths.boot_id()
    except OSError as error:
        _log.error("cannot tell which boot this is: %s: %s", error.filename, error.strerror)
        return None
    return NvPoolService(api, files, node, boot, settings.nv_ipam_namespace)


def plugin_of(
    paths: Paths, settings: AddressSettings, service: "NvPoolService | None"
) -> Callable[[], NvIpam | None]:
    """What serves definitions of nv-ipam; None where they are not followed."""
    if settings.nv_ipam != "follow":
        return lambda: None
    conf = options.conf_of(paths.cni_conf)
    plugin = NvIpam(paths.ipam, conf, service.follower if service is not None else None)
    return lambda: plugin


def families(service: "NvPoolService") -> Callable[[], "Sequence[Metric]"]:
    """What a scrape shows of the pools."""
    return lambda: _families(service)


def _families(service: "NvPoolService") -> "Sequence[Metric]":
    from prometheus_client.metrics_core import GaugeMetricFamily

    addresses = GaugeMetricFamily(
        "podfabric_nv_ipam_addresses",
        "Addresses of nv-ipam's pools that are this node's, by pool.",
        labels=("pool", "state"),
    )
    for key, state in service.follower.states.items():
        for name in ("usable", "blocked", "outside"):
            addresses.add_metric((key, name), getattr(state, name))
    return (addresses,)
