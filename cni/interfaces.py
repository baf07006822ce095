"""The interface plugins of a node, and the names of their executables."""

from collections.abc import Callable, Mapping

from base.paths import Paths
from cni.attachments.rail_plugin import RailPlugin
from cni.ipoib.plugin import IPoIB
from cni.macvlan.plugin import Ipvlan, Macvlan
from cni.spec.plugin import Plugin
from cni.sriov.plugin import Sriov
from ipam.plugin import AddressPlugin
from policy import rules


def by_executable(
    paths: Paths, addresses: AddressPlugin | None = None, policy: rules.Source | None = None
) -> Mapping[str, RailPlugin]:
    """The interface plugins, by the name of an executable.

    The reference plugins may have the names "macvlan" and "ipvlan", so podfabric's have two names.
    """
    sriov = Sriov(paths, addresses, policy)
    macvlan, ipvlan = (kind(paths, addresses, policy) for kind in (Macvlan, Ipvlan))
    return {
        "ipoib": IPoIB(paths, addresses, policy),
        "sriov": sriov,
        "ib-sriov": sriov,
        "macvlan": macvlan,
        "podfabric-macvlan": macvlan,
        "ipvlan": ipvlan,
        "podfabric-ipvlan": ipvlan,
    }


def loaders(plugins: Mapping[str, Plugin]) -> dict[str, Callable[[Mapping[str, str]], Plugin]]:
    """Functions that return the plugin of a call, by the name of the executable."""

    def loader(plugin: Plugin) -> Callable[[Mapping[str, str]], Plugin]:
        return lambda environ: plugin

    return {name: loader(plugin) for name, plugin in plugins.items()}
