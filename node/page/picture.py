"""Draws a node as nested boxes: sockets, PCIe switches, HCAs with ports and VFs, GPUs, and pods."""

from collections.abc import Iterator, Sequence, Set
from xml.etree.ElementTree import Element

from node.fabric_node import FabricNodeStatus, GpuStatus, HcaStatus
from node.page.markup import Content, tag
from node.state import numa_text

_MOST = 64  # pods or VFs of a device


def state_of(hca: HcaStatus) -> tuple[str, str]:
    """The state of an HCA in words, and its class: good, bad or idle."""
    if not hca.present:
        return "gone", "bad"
    states = {port.state for port in hca.ports}
    if hca.fault or states - {"ACTIVE"}:
        return ", ".join(sorted(states)).lower() or "faulty", "bad" if hca.fault else "idle"
    return (
        ("active", "good")
        if states
        else ("in a pod", "idle")
        if hca.rdma
        else ("no RDMA device", "idle")
    )


def drawn(status: FabricNodeStatus) -> Sequence[Element]:
    """The picture. Empty if the node has neither HCAs nor GPUs."""
    devices: list[HcaStatus | GpuStatus] = [*status.hcas, *status.gpus]
    # A VF is drawn in its PF's box, unless the FabricNode lacks the PF.
    ids = {device.id for device in devices}
    tops = [one for one in devices if not (isinstance(one, HcaStatus) and one.pf in ids)]
    holders = {pod for hca in status.hcas for pod in hca.pods}
    sockets = sorted({numa_text(device.numa) for device in tops})
    boxes = []
    for socket in sockets:
        here = [device for device in tops if numa_text(device.numa) == socket]
        switches = sorted({device.switch for device in here})
        groups = (
            tag(
                "div",
                tag("h5", f"PCIe switch {switch}" if switch else "no PCIe switch"),
                *(_device(device, status, holders) for device in here if device.switch == switch),
                class_="switch",
            )
            for switch in switches
        )
        boxes.append(
            tag(
                "div",
                tag("h4", f"NUMA node {socket}" if socket else "NUMA node unknown"),
                *groups,
                class_="socket",
            )
        )
    if not boxes:
        return ()
    note = "✓: the pod holds the HCA of its interface. ✗: the pod holds another HCA."
    return tag("div", *boxes, class_="node"), tag("p", note)


def _device(device: HcaStatus | GpuStatus, status: FabricNodeStatus, holders: Set[str]) -> Element:
    if isinstance(device, GpuStatus):
        mark = "bad" if device.fault else "idle"
        content: list[Content] = [tag("h6", f"GPU {device.id}")]
        content += (tag("p", f"pod {pod}") for pod in device.pods[:_MOST])
        return tag("div", *content, class_=f"device gpu {mark}")
    state, mark = state_of(device)
    return tag(
        "div",
        tag("h6", ", ".join(device.rdma) or device.id),
        tag("p", device.id if device.rdma else "", f" {device.fault or state}"),
        *(tag("p", f"port {port.port}: {port.state} {port.rate}") for port in device.ports[:_MOST]),
        *_pods(device, status, holders),
        *(tag("p", "VF ", *_vf(vf, status, holders)) for vf in _vfs(device, status)[:_MOST]),
        class_=f"device {mark}",
    )


def _vfs(pf: HcaStatus, status: FabricNodeStatus) -> list[HcaStatus]:
    return [hca for hca in status.hcas if hca.pf == pf.id]


def _vf(vf: HcaStatus, status: FabricNodeStatus, holders: Set[str]) -> Iterator[Content]:
    yield f"{vf.id} {state_of(vf)[0]} "
    yield from _pods(vf, status, holders)


def _pods(hca: HcaStatus, status: FabricNodeStatus, holders: Set[str]) -> Iterator[Element]:
    """A line for each pod that holds the HCA or has an interface on the HCA."""
    interfaces: dict[str, list[str]] = {pod: [] for pod in hca.pods if pod}
    for one in status.attachments:
        if one.hca == hca.id:
            interfaces.setdefault(one.pod, []).append(one.interface)
    for pod, names in list(interfaces.items())[:_MOST]:
        match = " ✓" if names and pod in hca.pods else " ✗" if names and pod in holders else ""
        yield tag("span", f"pod {pod} {', '.join(names)}{match}", class_="line")
