"""Counts the RDMA objects of each pod, such as queue pairs, on devices in the host's namespace.

The kernel names the process of an object. The cgroup of the process names the pod. A process that
is in no pod is left out.
"""

from collections import Counter
from collections.abc import Iterator

from cni.attachments.journal import Journal, JournalEntry
from gpu.limits import processes
from host.netlink import rdma, rdma_objects
from node.fabric_node import RdmaObjects
from node.state import ThisNode


def of_pods(node: ThisNode) -> tuple[RdmaObjects, ...]:
    """The objects of each pod on each device, sorted. Raises HostError.

    Returns () outside the host's PID namespace, because the kernel hides the pids there.
    """
    if not processes.sees_the_host():
        return ()
    counts: dict[tuple[str, str], Counter[str]] = {}
    with rdma.rdma() as socket:
        for device in rdma.devices(socket):
            for kind, by_pid in rdma_objects.by_process(socket, device).items():
                for pid, count in by_pid.items():
                    if container := processes.container_of(pid):
                        of_pod = counts.setdefault((container.pod_uid, device.name), Counter())
                        of_pod[kind] += count
    names = dict(_names(node)) if counts else {}
    return tuple(
        RdmaObjects(pod=names.get(uid, uid), device=device, **found)
        for (uid, device), found in sorted(counts.items())
    )


def _names(node: ThisNode) -> Iterator[tuple[str, str]]:
    """The name of each pod that holds a device or an interface, by UID."""
    for holder in node.holders.by_key.values():
        if holder.uid:
            yield holder.uid, holder.pod
    for entry in Journal(node.paths).entries():
        if isinstance(entry, JournalEntry) and entry.pod_uid:
            yield entry.pod_uid, f"{entry.pod_namespace}/{entry.pod_name}"
