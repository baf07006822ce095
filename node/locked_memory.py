"""Finds the limits of locked memory of the containers with HCAs, in /proc."""

import os
import re
from collections.abc import Collection
from contextlib import suppress
from math import inf

import msgspec

from base.paths import Paths
from deviceplugin.allocate import environment
from deviceplugin.pools.pool import Pool
from gpu.limits.processes import Container, container_in
from host.sysfs import attribute_files

LOCKED = re.compile(r"^Max locked memory\s+(\S+)", re.MULTILINE)
_MOST_ENVIRON = 1 << 20  # bytes


class ContainerLimit(msgspec.Struct, frozen=True):
    """A limit is "unlimited", or a number of bytes such as "65536"."""

    container: Container
    limit: str  # the soft limit of the container's oldest process
    wanted: str  # the limit that its pool gives

    @property
    def is_low(self) -> bool:
        return size_of(self.limit) < size_of(self.wanted)


def size_of(limit: str) -> float:
    """The number of bytes of a limit."""
    return int(limit) if limit.isdecimal() else inf


def wanted(pools: Collection[Pool]) -> dict[str, str]:
    """The limits that pools with HCAs give, by the variable in the environment of containers."""
    return {
        environment.variable(pool.config): pool.config.memlock
        for pool in pools
        if pool.hcas and pool.config.memlock
    }


def of_containers(
    paths: Paths, limits: dict[str, str], pods: Collection[str] = ()
) -> list[ContainerLimit]:
    """The limits of containers with one of the variables of `limits`, from `wanted`.

    Without `pods`, which are UIDs, all containers count. Only the oldest process of a container
    counts, because `kubectl exec` starts no hook.
    """
    oldest: dict[Container, tuple[int, str]] = {}
    for pid in attribute_files.names(str(paths.proc)) if limits else ():
        directory = f"{paths.proc}/{pid}"
        if not pid.isdecimal():
            continue
        container = container_in(attribute_files.text(f"{directory}/cgroup", errors="replace"))
        if container is None or (pods and container.pod_uid not in pods):
            continue
        with suppress(ValueError, IndexError):  # the process has ended
            stat = attribute_files.text(f"{directory}/stat", errors="replace")
            begun = int(stat.rpartition(")")[2].split()[19]), directory
            oldest[container] = min(oldest.get(container, begun), begun)
    found = []
    for container, (_, directory) in sorted(oldest.items(), key=lambda item: item[1]):
        with suppress(OSError, ValueError):
            given = [limits[name] for name in _variables(directory) if name in limits]
            has = LOCKED.search(attribute_files.text(f"{directory}/limits"))
            if has:
                found.append(ContainerLimit(container, has[1], max(given, key=size_of)))
    return found


def _variables(directory: str) -> set[str]:
    """The names of a process' variables. Raises OSError."""
    with open(f"{directory}/environ", "rb") as file:  # noqa: PTH123
        content = os.fsdecode(file.read(_MOST_ENVIRON))
    return {variable.partition("=")[0] for variable in content.split("\0")}
