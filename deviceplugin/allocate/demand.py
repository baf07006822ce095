"""Which GPUs a container has that is to get HCAs now, as far as that can be known.

The kubelet does not say for whom it allocates. It allocates a container's resources one after the
other in random order, so a container may have its GPUs and still lack its HCAs; PodResources shows
it then. A container that has GPUs and never asks for an HCA looks the same there. But the kubelet
writes its checkpoint when it is done with a container and not before (allocateContainerResources
in its manager.go): whatever that has without an HCA gets none any more.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from host.gpus import GPU, address_of


class HeldIds(Protocol):
    """The device ids of one resource that a container holds (kubelet.PodDevices)."""

    @property
    def namespace(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def uid(self) -> str: ...
    @property
    def container(self) -> str: ...
    @property
    def resource(self) -> str: ...
    @property
    def ids(self) -> Sequence[str]: ...


_Container = tuple[str, str, str, str]  # namespace, name, uid, container
_Devices = frozenset[tuple[str, str]]  # resource, id


def waiting_gpus(
    holdings: Iterable[HeldIds],
    ours: Collection[str],
    gpus: Sequence[GPU],
    written: Iterable[HeldIds] = (),
) -> list[str]:
    """The addresses, sorted, of the GPUs of the one container that has GPUs and nothing of ours.

    `holdings` are PodResources', `written` the checkpoint's, () if that cannot be read; `ours` are
    the resources of this plugin. [] if no container is like that, or several are that hold
    different GPUs: which of them is asking cannot be told. Containers that hold the same GPUs count
    as one, such as a container and the init container before it.

    The two know pods by different names, so a container is found in the checkpoint by its own name
    and its devices. One that was given the very devices of a pod that ended a moment ago, without
    an HCA and with a container of that name, is taken for that one.
    """
    finished = {(key[3], devices) for key, devices in _without_ours(written, ours).items()}
    waiting = set()
    for key, devices in _without_ours(holdings, ours).items():
        addresses = {address_of(gpus, device_id) for _, device_id in devices} - {""}
        if addresses and (key[3], devices) not in finished:
            waiting.add(frozenset(addresses))
    return sorted(next(iter(waiting))) if len(waiting) == 1 else []


def _without_ours(holdings: Iterable[HeldIds], ours: Collection[str]) -> dict[_Container, _Devices]:
    """What each container holds of those that hold nothing of ours."""
    found: dict[_Container, _Devices] = {}
    served: set[_Container] = set()
    for one in holdings:
        key = one.namespace, one.name, one.uid, one.container
        found[key] = found.get(key, frozenset()) | {(one.resource, known) for known in one.ids}
        if one.resource in ours and one.ids:
            served.add(key)
    return {key: devices for key, devices in found.items() if key not in served}
