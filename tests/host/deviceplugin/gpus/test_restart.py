"""An agent that starts again while containers run: their slots, limits and files stay untouched."""

import os
from ctypes import sizeof
from pathlib import Path

from base.paths import Paths
from deviceplugin import checkpoint
from gpu import layout, processes
from gpu.groups import Groups
from gpu.registration import Registrar
from gpu.tenants import Tenants
from tests.host.deviceplugin.gpus.gpu_node import (
    COMPUTE,
    GIB,
    MEMORY,
    GpuNode,
    await_restarted,
    container,
    units,
)
from tests.kubelet.kubelet import Kubelet
from tests.unit.gpu.groups import PlainRooms


def own_groups(paths: Paths) -> Groups:
    """The groups as an agent has them that has just started."""
    return Groups(paths.run / "gpu", rooms=PlainRooms())


def files_of(paths: Paths, *names: str) -> dict[Path, tuple[object, ...]]:
    """What changes when one of these files is written or replaced."""
    roots = (paths.cdi, paths.run / "gpu")
    found = [path for root in roots for path in root.rglob("*") if path.name in names]
    found += paths.cdi.glob("*")
    states = {path: path.stat() for path in found}
    return {
        path: (of.st_ino, of.st_mtime_ns, of.st_ctime_ns, path.read_bytes())
        for path, of in states.items()
    }


def test_the_next_agent_touches_no_file_of_a_running_container(
    paths: Paths, kubelet: Kubelet
) -> None:
    """Its device plugin, and its registrar, which adopts the processes."""
    node = GpuNode(paths, [units(8)], groups=own_groups(paths))
    try:
        kubelet.wait(lambda: kubelet.allocatable(MEMORY) == 16 and kubelet.allocatable(COMPUTE))
        for name, memory in (("first", 2), ("second", 7)):
            kubelet.admit(name, [container(memory=memory, compute=30)])
        groups = node.own_groups
        assert groups is not None
        for group in groups.names():  # a process of it, which is this one
            began = processes.start_time(os.getpid())
            assert began is not None
            registered = groups.register(group, 5, os.getpid(), began)
            claimed = layout.PfSlot(state=layout.SLOT_USED, registration=registered.registration)
            claimed.data_bytes = GIB
            with (groups.root / group / "region").open("r+b") as region:
                region.seek(layout.SLOT_AT + 5 * sizeof(layout.PfSlot))
                region.write(bytes(claimed))
        before, given = files_of(paths, "limits", "region"), checkpoint.read(paths).allocations
        assert len(before) == 6

        node.plugin.close()
        node.own_groups = own_groups(paths)
        registrar = Registrar(node.own_groups, Tenants(lambda: node.plugin.tenants(), groups.root))
        node.start()
        registrar.start()
        try:
            await_restarted(kubelet)
            node.plugin.compare()
            assert checkpoint.read(paths).allocations == given
            assert files_of(paths, "limits", "region") == before
            alive = {group: groups.read(group).processes[5].alive for group in groups.names()}
            assert list(alive.values()) == [True, True]
        finally:
            registrar.close()
    finally:
        node.plugin.close()
