"""Addresses for pods: ranges, who holds what, and the IPAM plugin `podfabric-ipam`.

From the configuration to the disk: `options` (what a network may say), `ranges`, `allocation` and
`others` (which address is next), `segments` (the link it is for), `store` (owners, reservations,
the interface of a store), `sqlite_store` with `tables`, `log`, `recovery` and `upgrade` (the store
of one node), `plugin` (the five verbs), `delegation` (how the interface plugins call them), `fsck`,
`importing` and `commands` (what an operator types). The kernel is none of its business: it hands
out numbers.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cni.spec.plugin import Plugin

ABOUT = "podfabric-ipam: gives pods addresses from ranges, kept on this node"


def main() -> None:
    """The executable `podfabric-ipam`."""
    from cni.spec.entry import main as serve

    serve(_load, ABOUT)


def _load() -> "Plugin":
    import os

    from cni.policy import rules
    from host.paths import Paths
    from ipam.plugin import AddressPlugin

    paths = Paths.from_environ(os.environ)
    return AddressPlugin.on_node(paths.ipam, paths.boot_id, rules.on_node(paths.config))
