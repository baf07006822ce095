"""Addresses for pods: ranges, who holds what, and the IPAM plugin `podfabric-ipam`.

From the configuration to the disk: `options` (what a network may say), `ranges`, `allocation` and
`others` (which address is next), `segments` (the link it is for), `store` (owners, reservations,
the interface of a store), `sqlite_store` with `database`, `tables`, `watermark` and
`recovery` (the store of one node), `plugin` (the five verbs), `executable` (the verbs as a process,
one at a time for an attachment), `delegation` (how our interface plugins call them), `fsck` with
`salvage`, `importing` and `commands` (what an operator types). It hands out numbers, and does not
touch the kernel.
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
    from cni import standalone
    from cni.policy import cluster
    from ipam import scope
    from ipam.executable import IpamExecutable
    from ipam.plugin import AddressPlugin

    paths = standalone.paths()
    policy, subjects = cluster.on_node(paths)
    addresses = AddressPlugin.on_node(
        paths.ipam,
        paths.boot_id,
        policy,
        scope.on_node(paths.config, paths.ipam),
        subjects,
    )
    return IpamExecutable(addresses, paths.locks)
