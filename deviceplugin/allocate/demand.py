"""Guesses which GPUs the container has that will get HCAs now.

The kubelet does not say for which container it allocates. It allocates the resources of a container
one after the other in random order, so a container may already have its GPUs and still lack its
HCAs; PodResources shows it then. A container that has GPUs and asks for no HCA looks the same
there. But the kubelet writes its checkpoint only after it has finished with a container
(allocateContainerResources in its manager.go): a container in the checkpoint gets no more devices.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from deviceplugin.kubelet.records import PodDevices
from host.sysfs.gpus import GPU, address_of

NOTHING_KNOWN: Mapping[tuple[str, str], str] = {}

_Container = tuple[str, str, str, str]  # namespace, name, uid, container
_Devices = frozenset[tuple[str, str]]  # resource, id


def waiting_gpus(
    rows: Iterable[PodDevices],
    ours: Collection[str],
    gpus: Sequence[GPU],
    in_checkpoint: Iterable[PodDevices] = (),
    known: Mapping[tuple[str, str], str] = NOTHING_KNOWN,
) -> list[str]:
    """The sorted addresses of the GPUs of the one container that has GPUs and none of our HCAs.

    `rows` are PodResources', `in_checkpoint` those of the kubelet's checkpoint, () if it cannot be
    read; `ours` are the resources that are asked for now; `known` has the addresses of ids of our
    own pools of GPUs, "" if they may change. [] if there is no such container, or if several hold
    different GPUs, since it is unknown which of them is asking. Containers with the same GPUs count
    as one, for example a container and the init container before it.

    The two sources identify pods differently, so a container is found in the checkpoint by its
    name and its devices. It may be confused with a container of the same name that ended a moment
    ago, had the same GPUs, and had no HCA.
    """

    def address(resource: str, device_id: str) -> str | None:
        found = known.get((resource, device_id))
        return address_of(gpus, device_id) if found is None else found

    finished = {(key[3], devices) for key, devices in _without_ours(in_checkpoint, ours).items()}
    held_by_waiting = set()
    for key, devices in _without_ours(rows, ours).items():
        addresses = frozenset(filter(None, (address(*device) for device in devices)))
        if addresses and (key[3], devices) not in finished:
            held_by_waiting.add(addresses)
    return sorted(next(iter(held_by_waiting))) if len(held_by_waiting) == 1 else []


def _without_ours(rows: Iterable[PodDevices], ours: Collection[str]) -> dict[_Container, _Devices]:
    """The devices of each container that has none of our devices."""
    held: dict[_Container, _Devices] = {}
    served: set[_Container] = set()
    for row in rows:
        key = row.namespace, row.name, row.uid, row.container
        devices = {(row.resource, device_id) for device_id in row.ids}
        held[key] = held.get(key, frozenset()) | devices
        if row.resource in ours and row.ids:
            served.add(key)
    return {key: devices for key, devices in held.items() if key not in served}
