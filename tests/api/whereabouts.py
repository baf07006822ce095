"""whereabouts' kinds and objects on a real API server, and the nodes that read them."""

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ipam.controller.rounds import Rounds
from ipam.controller.whereabouts_coexistence import Mode
from ipam.controller.whereabouts_objects import API, IPPool
from ipam.leases.block_layout import pool_name
from ipam.leases.objects import AddressBlock, AddressPool, PoolSpec
from kube.resources import ApiError, Meta, Resource
from tests.api.server import ApiServer, Document, kind_of
from tests.unit.ipam.controller.cluster import read_world
from tests.waiting import until

GROUP = "whereabouts.cni.cncf.io"
NAMESPACE = "kube-system"
TEXT: Document = {"type": "string"}


def _fields(required: list[str], **properties: object) -> Document:
    return {"type": "object", "required": required, "properties": properties}


_ALLOCATION = _fields(["id", "podref"], id=TEXT, podref=TEXT, ifname=TEXT)
_SPECS: Mapping[str, Document] = {
    "IPPool": _fields(
        ["allocations", "range"],
        range=TEXT,
        allocations={"type": "object", "additionalProperties": _ALLOCATION},
    ),
    "OverlappingRangeIPReservation": _fields(
        ["podref"], podref=TEXT, containerid=TEXT, ifname=TEXT
    ),
    "NodeSlicePool": _fields(["range", "sliceSize"], range=TEXT, sliceSize=TEXT),
}


def install_kinds(server: ApiServer) -> None:
    """Install whereabouts' three kinds, as its version 0.9 has them."""
    for kind, spec in _SPECS.items():
        parts = {"spec": spec}
        if kind == "NodeSlicePool":
            slices = _fields(["nodeName", "sliceRange"], nodeName=TEXT, sliceRange=TEXT)
            parts["status"] = _fields(
                ["allocations"], allocations={"type": "array", "items": slices}
            )
        server.install_kind(kind_of(GROUP, kind, {"type": "object", "properties": parts}))


class OverlappingRangeIPReservation(Resource, frozen=True, kw_only=True):
    """An address that no range with its network name gives out a second time. podfabric does not
    read these objects."""

    API = API
    KIND = "OverlappingRangeIPReservation"
    PLURAL = "overlappingrangeipreservations"


@contextmanager
def in_pod(
    server: ApiServer, root: Path, executable: Path, log: Path, **environ: str
) -> Iterator[None]:
    """A program that runs below `root` with the files and variables of its pod."""
    account = root / "var/run/secrets/kubernetes.io/serviceaccount"
    account.mkdir(parents=True)
    shutil.copy(executable, root / executable.name)
    admin = json.loads(server.plane.kubeconfig("admin").read_text())
    (account / "token").write_text(admin["users"][0]["user"]["token"])
    (account / "namespace").write_text(NAMESPACE)
    shutil.copy(server.plane.directory / "ca.crt", account / "ca.crt")
    host = {
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": str(server.plane.port),
    }
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["chroot", str(root), f"/{executable.name}"],
            env={"PATH": os.environ["PATH"], **host, **environ},
            stdout=file,
            stderr=file,
        )
        try:
            yield
        finally:
            process.kill()
            process.wait()


@contextmanager
def shared_pool(
    server: ApiServer, mode: Mode, range_: str, size: int, clock: Callable[[], float]
) -> Iterator["Leader"]:
    """A pool of a range from which whereabouts has given addresses, and the controller. Both are
    removed afterwards."""
    install_kinds(server)
    meta = Meta(name=pool_name("", range_))
    spec = PoolSpec(range=range_, block_size=size)
    server.admin.create(AddressPool(metadata=meta, spec=spec))
    leader = Leader(server, mode, clock)
    try:
        yield leader
    finally:
        leader.stop()
        for block in server.admin.list(AddressBlock, {"spec.pool": meta.name}).items:
            server.admin.delete(block)
        server.admin.delete(server.admin.get(AddressPool, meta.name))
        for kind in (IPPool, OverlappingRangeIPReservation):
            until(partial(_is_empty, server, kind), 600.0, f"end of all {kind.KIND}")


def _is_empty(server: ApiServer, kind: type[Resource]) -> bool:
    """Delete all objects of the kind; returns whether there were none. A large object takes
    long."""
    try:
        found = server.admin.list(kind).items
        for each in found:
            server.admin.delete(each)
    except ApiError:
        return False
    return not found


class Leader:
    """The controller's rounds, in a thread after `start`."""

    def __init__(self, server: ApiServer, mode: Mode, clock: Callable[[], float]) -> None:
        self._server = server
        self._clock = clock
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self.change_to(mode)

    def change_to(self, mode: Mode) -> None:
        """Start another leader, as of a chart with that value."""
        self.rounds = Rounds(self._server.admin, clock=self._clock, whereabouts=mode)

    def round(self) -> None:
        self.rounds.round(read_world(self._server.admin, self._clock))

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="rounds")
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(0.3):
            self.round()
