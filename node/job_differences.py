"""Finds the differences between the pods of a job, and says what each does to NCCL and MPI."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from host.sysfs.topology import Distance
from node.job_pods import FabricOfPod
from node.usage import Part

_MOST_NAMES = 8
_TCP = "NCCL and MPI use TCP, or fail"
_EFFECTS = {
    "HCAS": "NCCL may hang without a message; a pod without an HCA uses TCP",
    "RATE": "the job runs at the rate of the slowest port",
    "LINK": "ports of different link layers cannot connect",
    "SUBNET": "ports of different InfiniBand subnets connect only through a router",
    "GIDS": "NCCL and UCX may choose GIDs of different kinds, which cannot connect",
    "P_KEY": "pods of different partitions do not reach each other, and connections time out",
    "INTERFACES": f"in a pod without the interface, {_TCP}",
    "MTU": "packets larger than the smallest MTU are lost",
    "GPUS": "beyond PXB, NCCL uses no GPUDirect RDMA, and the rate is lower",
    "MEMLOCK": f"registering more fails with ENOMEM, and {_TCP}",
}


class JobDifference(Part, frozen=True):
    """Pods that differ from most pods, or have a problem. `about` is the header of the column."""

    about: str
    pods: tuple[str, ...]
    text: str


def between(pods: Sequence[FabricOfPod]) -> list[JobDifference]:
    """The differences and problems. Pods with `unknown` are not compared."""
    known = [pod for pod in pods if not pod.unknown and not pod.launches]
    values = {pod.pod: _values(pod) for pod in known}
    found = [each for about in _EFFECTS for each in _unequal(about, values)]
    if known and not any(pod.hcas or pod.interfaces for pod in known):
        found.append(_problem("HCAS", list(values), f"no HCA and no interface: {_TCP}"))
    found += [*_down(known), *_partitions(known), *_low_limits(known)]
    found += [
        _problem("FAULT", [pod.pod], f"{fault}: {_TCP}") for pod in pods for fault in pod.faults
    ]
    for why in dict.fromkeys(pod.unknown for pod in pods if pod.unknown):
        names = [pod.pod for pod in pods if pod.unknown == why]
        found.append(_problem("FAULT", names, f"unknown: {why}"))
    return found


def _values(pod: FabricOfPod) -> Mapping[str, str]:
    """The values that all pods of a job should share, by the header; "" if unknown."""
    count = len(pod.hcas)
    active = [port for port in pod.ports if port.state == "ACTIVE"]
    names = (one.interface for one in pod.interfaces)
    return {
        "HCAS": f"{count or 'no'} HCA{'' if count == 1 else 's'}",
        "RATE": _several("rate", (port.rate for port in active)),
        "LINK": _several("link layer", (port.link_layer for port in pod.ports)),
        "SUBNET": _several("subnet", (port.subnet for port in active)),
        "GIDS": _several("GIDs", (" and ".join(port.gids) for port in active)),
        "P_KEY": _several("P_Key", (one.pkey for one in pod.interfaces)),
        "INTERFACES": _several("interface", names) or "no interface",
        "MTU": _several("MTU", (str(one.mtu or "") for one in pod.interfaces)),
        "GPUS": _several("GPU distance", nearest(pod)),
        "MEMLOCK": _several("locked memory", () if pod.memlock_wanted else (pod.memlock,)),
    }


def nearest(pod: FabricOfPod) -> Counter[str]:
    """The number of GPUs by the distance of their nearest HCA, such as {"PIX": 8}."""
    near = (gpu.distances.values() for gpu in pod.gpus if gpu.distances)
    return Counter(min(words, key=lambda word: Distance[word]) for words in near)


def _several(noun: str, values: Iterable[str]) -> str:
    found = sorted({value for value in values if value})
    return f"{noun} {' and '.join(found)}" if found else ""


def _unequal(about: str, every: Mapping[str, Mapping[str, str]]) -> Iterator[JobDifference]:
    groups: dict[str, list[str]] = {}
    for pod, values in every.items():
        if values[about]:
            groups.setdefault(values[about], []).append(pod)
    ordered = sorted(groups, key=lambda value: -len(groups[value]))
    if len(ordered) < 2:
        return
    is_most = len(groups[ordered[0]]) > len(groups[ordered[1]])
    rest = [f"most pods have {ordered.pop(0)}"] if is_most else []
    texts = [
        f"{_names(groups[it])} {'has' if len(groups[it]) == 1 else 'have'} {it}" for it in ordered
    ]
    pods = tuple(pod for value in ordered for pod in groups[value])
    text = f"{', '.join(texts + rest)}: {_EFFECTS[about]}"
    yield JobDifference(about=about, pods=pods, text=text)


def _down(pods: Sequence[FabricOfPod]) -> Iterator[JobDifference]:
    """Ports that are not ACTIVE, except ports that are unused in most pods."""
    down = {pod.pod: [port for port in pod.ports if port.state != "ACTIVE"] for pod in pods}
    usual = Counter(map(len, down.values())).most_common(1)[0][0] if pods else 0
    for pod in pods:
        active = {port.port.split("/")[0] for port in pod.ports if port.state == "ACTIVE"}
        if {port.port.split("/")[0] for port in down[pod.pod]} - active or len(
            down[pod.pod]
        ) > usual:
            states = ", ".join(f"{port.port} is {port.state}" for port in down[pod.pod])
            yield _problem("PORTS", [pod.pod], f"{states}: {_TCP}")


def _partitions(pods: Sequence[FabricOfPod]) -> Iterator[JobDifference]:
    """P_Keys that a port lacks, and partitions with several limited members."""
    members: dict[tuple[str, str], list[str]] = {}
    for pod in pods:
        for key in dict.fromkeys((one.member, one.pkey) for one in pod.interfaces):
            members.setdefault(key, []).append(pod.pod)
    for (member, pkey), names in members.items():
        if member == "missing":
            text = f"the port's table lacks P_Key {pkey}: connections time out"
            yield _problem("P_KEY", names, text)
        if member == "limited" and len(names) > 1:
            text = f"limited members of P_Key {pkey}: two limited members do not reach each other"
            yield _problem("P_KEY", names, text)


def _low_limits(pods: Sequence[FabricOfPod]) -> Iterator[JobDifference]:
    """Pods whose containers have less locked memory than their pool gives."""
    groups: dict[tuple[str, str], list[str]] = {}
    for pod in pods:
        if pod.memlock_wanted:
            groups.setdefault((pod.memlock, pod.memlock_wanted), []).append(pod.pod)
    for (limit, wanted), names in groups.items():
        text = f"locked memory {limit}, not {wanted}: {_EFFECTS['MEMLOCK']}"
        yield _problem("MEMLOCK", names, text)


def _problem(about: str, pods: list[str], text: str) -> JobDifference:
    return JobDifference(about=about, pods=tuple(pods), text=f"{_names(pods)}: {text}")


def _names(pods: Sequence[str]) -> str:
    """The names of pods of one namespace, without the namespace."""
    names = [pod.partition("/")[2] for pod in pods]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
