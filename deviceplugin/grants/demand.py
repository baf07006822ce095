"""Which GPUs a container has that is to get HCAs now, as far as that can be known.

The kubelet does not say for whom it allocates. It allocates a container's resources one after the
other in random order, so a container may have its GPUs and still lack its HCAs; PodResources shows
it then. A container that has GPUs and never asks for an HCA looks the same.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

from host.gpus import GPU, address_of


class Holding(Protocol):
    """The device ids of one resource that a container holds (kubelet.PodDevices)."""

    @property
    def namespace(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def container(self) -> str: ...
    @property
    def resource(self) -> str: ...
    @property
    def ids(self) -> Sequence[str]: ...


def waiting_gpus(
    holdings: Sequence[Holding], ours: Collection[str], gpus: Sequence[GPU]
) -> list[str]:
    """The addresses, sorted, of the GPUs of the one container that has GPUs and nothing of ours.

    `ours` are the resources of this plugin. [] if no container is like that, or several are that
    hold different GPUs: which of them is asking cannot be told. Containers that hold the same GPUs
    count as one, such as a container and the init container before it.
    """
    of_container: dict[tuple[str, str, str], set[str]] = {}
    served: set[tuple[str, str, str]] = set()
    for holding in holdings:
        key = (holding.namespace, holding.name, holding.container)
        if holding.resource in ours:
            if holding.ids:
                served.add(key)
            continue
        addresses = {address_of(gpus, device_id) for device_id in holding.ids} - {""}
        if addresses:
            of_container.setdefault(key, set()).update(addresses)
    waiting = {frozenset(found) for key, found in of_container.items() if key not in served}
    return sorted(next(iter(waiting))) if len(waiting) == 1 else []
