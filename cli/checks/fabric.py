"""Checks of ports, interfaces, and the distances of GPUs."""

import re
from collections.abc import Iterator

from base.paths import Paths
from cli.checks import Outcome, failed, not_applicable, ok, warning
from deviceplugin import availability
from host.sysfs import attribute_files
from host.sysfs.discovery import HCA, Port
from host.sysfs.topology import Distance
from node.state import ThisNode, gpu_label, rdma_label

_WIDTH = re.compile(r"\(([0-9]+)X")
_USUAL_WIDTH = 4  # lanes of a port; with fewer lanes a cable or slot is bad


def ports(node: ThisNode) -> Iterator[Outcome]:
    """An inactive port is a failure if a pool offers the port's HCA, otherwise a warning."""
    offered = {hca.id for pool in node.pools for hca in pool.hcas}
    later = _set_up_with_pods(node)
    rows = [(hca, rdma.name, port) for hca in node.hcas for rdma in hca.rdma for port in rdma.ports]
    active = waiting = 0
    for hca, name, port in rows:
        where = f"port {port.number} of {name} ({hca.id})"
        width = _WIDTH.search(port.rate)
        if port.state != "ACTIVE" and hca.id in later:
            waiting += 1
        elif port.state != "ACTIVE":
            bad = failed if hca.id in offered else warning
            physical = port.physical_state or "no physical state"
            yield bad(f"{where} is {port.state or 'gone'} ({physical})", _why_down(hca, port))
        elif width and int(width[1]) < _USUAL_WIDTH:
            yield warning(
                f"{where} is degraded: {port.rate}, it uses {width[1]} of {_USUAL_WIDTH} lanes",
                "look at cable and transceivers: `mlxlink -d DEVICE`, `iblinkinfo`",
            )
        else:
            active += 1
    if not rows:
        yield not_applicable("no RDMA device has a port here")
    elif active or waiting:
        more = f", {waiting} become active with the pods that get them" if waiting else ""
        yield ok(f"{active} of {len(rows)} ports are ACTIVE{more}")


def ipoib_parents(node: ThisNode) -> Iterator[Outcome]:
    """Check that IPoIB parents are up. The children of a parent that is down have no carrier."""
    later = _set_up_with_pods(node)
    parents = (hca for hca in node.hcas if "infiniband" in hca.link_types)
    names = [netdev for hca in parents if hca.id not in later for netdev in hca.netdevs]
    states = {name: _is_up(node.paths, name) for name in names}
    down = sorted(name for name, up in states.items() if up is False)
    if not names:
        yield not_applicable("the host has no IPoIB interface")
    elif down:
        commands = "; ".join(f"ip link set {name} up" for name in down)
        yield failed(f"down: {', '.join(down)}: their children have no carrier", f"`{commands}`")
    elif None in states.values():
        yield not_applicable(f"{node.paths.sys}/class/net does not say whether they are up")
    else:
        yield ok(f"up: {', '.join(names)}")


def gpu_distances(node: ThisNode) -> Iterator[Outcome]:
    hcas = [hca for hca in node.hcas if hca.address and hca.rdma_names]
    if not node.gpus or not hcas:
        yield not_applicable("the node does not have both GPUs and HCAs")
        return
    far: dict[Distance, list[str]] = {}
    for gpu in node.gpus:
        near = min(node.topology.distance(gpu.address, hca.address) for hca in hcas)
        if near > Distance.PXB:
            far.setdefault(near, []).append(gpu_label(node.gpus, gpu.address))
    for distance, labels in sorted(far.items()):
        yield warning(
            f"{', '.join(labels)}: the nearest HCA is at {distance.name}: GPUDirect RDMA "
            "reaches only as far as PXB",
            "`podfabric topo` shows the distances of the slots; a virtual machine may hide them",
        )
    if not far:
        yield ok("each GPU has an HCA at PXB or nearer")


def _set_up_with_pods(node: ThisNode) -> set[str]:
    """The offered VFs and SFs whose ports become active only in a pod."""
    offered = [(pool, hca) for pool in node.pools for hca in pool.hcas]
    ids = {hca.id for _, hca in offered if hca.pf in node.reports}
    return ids.difference(
        hca.id for pool, hca in offered if availability.own_ports_count(pool, hca, node.reports)
    )


def _why_down(hca: HCA, port: Port) -> str:
    if port.state == "INIT":
        return (
            "it has a link and waits for a subnet manager: does one run on this fabric (`sminfo`)? "
            "Start it on the switch, or start opensm on a node"
        )
    if port.link_layer == "Ethernet":
        names = ", ".join(hca.netdevs) or "its interface"
        return f"set {names} up; if it is up, look at the cable and the switch's port"
    if hca.pf:
        return (
            "the link of a VF follows its policy: `ip link set PF vf N state auto`; it also needs "
            f"a GUID, otherwise no subnet manager activates {rdma_label(hca)}"
        )
    if port.physical_state == "Disabled":
        return "it was disabled: `ibportstate` on the switch, `mlxlink -d DEVICE --port_state UP`"
    return "look at the cable and the switch's port; `ibstat`, `mlxlink -d DEVICE`"


def _is_up(paths: Paths, netdev: str) -> bool | None:
    """Whether an interface is up (IFF_UP), or `None` if sysfs lacks its flags."""
    try:
        return bool(int(attribute_files.text(f"{paths.sys}/class/net/{netdev}/flags"), 0) & 1)
    except ValueError:
        return None
