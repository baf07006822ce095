"""Row A13: nodes of podfabric and of the real whereabouts, with the same definition.

Scaled to two CPUs: four nodes of each side and some hundred pods (PODFABRIC_BESIDE=8x31x600 means
eight nodes with 31 pods each, for ten minutes). whereabouts' plugin is built from its sources and
started as a runtime starts it. Other tests run its reconciler and its control loop.
"""

import json
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import pytest

from cni.spec.errors import CNIError, Code
from ipam.controller.whereabouts_objects import IPPool, PoolEntry, entries
from ipam.leases.objects import AddressBlock, AddressPool
from tests.api.server import DEFINITIONS, ApiServer, name
from tests.api.whereabouts import Leader, in_pod, shared_pool
from tests.cluster import programs
from tests.cluster.peers import WHEREABOUTS
from tests.cluster.programs import Program
from tests.unit.ipam.leases.nodes import ClusterNode
from tests.waiting import join, until

RECONCILER = Program(
    "whereabouts-reconciler",
    WHEREABOUTS.module,
    WHEREABOUTS.version,
    {"reconciler": "cmd/reconciler"},
    archives=WHEREABOUTS.archives,
)
CONTROL_LOOP = Program(
    "whereabouts-controlloop",
    WHEREABOUTS.module,
    WHEREABOUTS.version,
    {"controlloop": "cmd/controlloop"},
    archives=WHEREABOUTS.archives,
)
# The tag of this version lacks one program, and its control loop keeps such an address.
needs_sources = pytest.mark.skipif(
    not WHEREABOUTS.archive_files(),
    reason="whereabouts' sources are not here: PODFABRIC_PEERS names their directory",
)
RANGE = "10.89.0.0/24"
POOL = "10.89.0.0-24"
IPAM = {"range": RANGE}
SIDES, PODS, SECONDS = map(int, os.environ.get("PODFABRIC_BESIDE", "4x10x40").split("x"))
"""Nodes of each side, pods that each node of ours churns at a time, and seconds of churn."""


class Theirs:
    """Nodes of whereabouts: processes of its plugin, started as a runtime starts them. The
    node's name, `node`, matters only if a range is cut into slices."""

    def __init__(
        self,
        executable: Path,
        kubeconfig: Path,
        directory: Path,
        ipam: Mapping[str, str] = IPAM,
        node: str = "",
    ) -> None:
        self._executable = executable
        self._node = node
        flat = directory / "whereabouts.conf"
        settings = {"datastore": "kubernetes", "kubernetes": {"kubeconfig": str(kubeconfig)}}
        flat.write_text(json.dumps(settings))
        whole = {"type": "whereabouts", **ipam, **settings, "configuration_path": str(flat)}
        document = {"cniVersion": "1.0.0", "name": "n1", "type": "macvlan", "ipam": whole}
        self._config = json.dumps(document).encode()

    def call(self, command: str, pod: str) -> dict[str, object] | None:
        """The answer; `None` if the call failed."""
        environ = {
            "PATH": os.environ["PATH"],
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": f"{pod}-1",
            "CNI_IFNAME": "eth0",
            "CNI_NETNS": "/none",
            "CNI_PATH": str(self._executable.parent),
            "CNI_ARGS": f"IgnoreUnknown=1;K8S_POD_NAMESPACE=theirs;K8S_POD_NAME={pod}",
            "NODENAME": self._node,
        }
        done = subprocess.run(
            [str(self._executable)],
            input=self._config,
            env=environ,
            capture_output=True,
            check=False,
        )
        if done.returncode:
            return None
        answer: dict[str, object] = json.loads(done.stdout) if done.stdout.strip() else {}
        return answer

    def add(self, pod: str) -> str | None:
        """Call ADD; returns the address."""
        answer = self.call("ADD", pod)
        if answer is None:
            return None
        ips = answer["ips"]
        assert isinstance(ips, list)
        return str(ips[0]["address"]).partition("/")[0]


class Ledger:
    """The user of each address. A second user of an address fails the test."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.users: dict[str, str] = {}
        self.duplicates: list[str] = []
        self.given = 0

    def use(self, address: str, user: str) -> None:
        with self._lock:
            self.given += 1
            if address in self.users:
                self.duplicates.append(f"{address}: {self.users[address]} and {user}")
            self.users[address] = user

    def drop(self, address: str) -> None:
        with self._lock:
            self.users.pop(address, None)


@pytest.fixture
def leader(server: ApiServer) -> Iterator[Leader]:
    with shared_pool(server, "Coexist", RANGE, 8, time.monotonic) as leader:
        until(partial(_is_offered, server, leader), what="blocks on offer")
        yield leader


def _is_offered(server: ApiServer, leader: Leader) -> bool:
    leader.round()
    return bool(server.admin.get(AddressPool, POOL).status.offered)


@pytest.fixture
def nodes(server: ApiServer, leader: Leader, tmp_path: Path) -> Iterator[list[ClusterNode]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                closing(ClusterNode(server.node(each), tmp_path / each, each, kept=True))
            )
            for each in (name("beside") for _ in range(SIDES))
        ]


@pytest.fixture
def theirs(server: ApiServer, tmp_path: Path) -> Theirs:
    (built,) = programs.build([WHEREABOUTS])
    return Theirs(built / "whereabouts", server.plane.kubeconfig("admin"), tmp_path)


def test_nodes_of_whereabouts_and_ours_never_give_one_address_twice(
    server: ApiServer, leader: Leader, nodes: list[ClusterNode], theirs: Theirs
) -> None:
    """After all nodes have moved, whereabouts' own entries are unchanged."""
    ledger = Ledger()
    staying = {f"stay{number}": theirs.add(f"stay{number}") for number in range(4)}
    for pod, address in staying.items():
        assert address is not None
        ledger.use(address, pod)
    leader.start()
    began = time.monotonic()

    def over() -> bool:
        return time.monotonic() - began > SECONDS

    def churn_ours(number: int) -> None:
        node, held, count = nodes[number], dict[str, str](), 0
        while not over() or not count:
            if len(held) >= PODS:
                pod = random.choice(sorted(held))
                ledger.drop(held.pop(pod))
                node.delete(pod, ipam=IPAM)
            pod, count = f"ours{number}-{count}", count + 1
            try:
                (address,) = node.add(pod, dict(IPAM))
            except CNIError as error:
                assert error.code in (Code.TRY_AGAIN, Code.NO_FREE_ADDRESS), error
                node.delete(pod, ipam=IPAM)
            else:
                ledger.use(address, pod)
                held[pod] = address
            node.steps(1, 3.0)
        for pod, address in held.items():
            ledger.drop(address)
            node.delete(pod, ipam=IPAM)

    def churn_theirs(number: int) -> None:
        count = 0
        while not over() or not count:
            pod, count = f"theirs{number}-{count}", count + 1
            address = theirs.add(pod)
            if address is not None:
                ledger.use(address, pod)
                time.sleep(0.2)
                ledger.drop(address)
            theirs.call("DEL", pod)

    threads = [
        threading.Thread(target=work, args=(number,))
        for work in (churn_ours, churn_theirs)
        for number in range(SIDES)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread, 600.0)
    assert ledger.duplicates == []
    assert ledger.given > 3 * SIDES
    for node in nodes:
        node.lessee.leaving = True
        node.steps(40, 15.0)
    assert server.admin.list(AddressBlock, {"spec.pool": POOL}).items == ()
    assert _placeholders(server)
    leader.change_to("Read")
    until(lambda: not _placeholders(server), what="end of all placeholders")
    assert {entry.allocation.podref for entry in _entries(server)} == {
        f"theirs/{pod}" for pod in staying
    }


def _entries(server: ApiServer) -> list[PoolEntry]:
    pools = server.admin.list(IPPool).items
    return [entry for pool in pools if pool.spec.range == RANGE for entry in entries(pool)]


def _placeholders(server: ApiServer) -> set[str]:
    return {entry.offset for entry in _entries(server) if entry.allocation.is_placeholder}


def test_a_leader_killed_after_any_change_leaves_the_rest_to_the_next_one(
    server: ApiServer, leader: Leader, nodes: list[ClusterNode], theirs: Theirs
) -> None:
    """Each leader dies after one change, of an IPPool or of the pool's status; whereabouts
    continues."""
    used: set[str] = set()
    for number in range(24):
        leader.change_to("Coexist")
        with suppress(LeaderDied):
            _dies_after_a_change(leader)
        ours = nodes[number % SIDES]
        for found in (theirs.add(f"theirs{number}"), _add_if_it_can(ours, f"ours{number}")):
            assert found not in used
            if found is not None:
                used.add(found)
    assert len(used) > 24


class LeaderDied(Exception):
    """Raised to end a leader."""


def _dies_after_a_change(leader: Leader) -> None:
    api = leader.rounds._sharing._api

    def dying(call: Callable[..., object]) -> Callable[..., object]:
        def once(*arguments: object) -> object:
            call(*arguments)
            raise LeaderDied

        return once

    with pytest.MonkeyPatch.context() as patch:
        for verb in ("create", "patch", "update_status"):
            patch.setattr(api, verb, dying(getattr(api, verb)))
        leader.round()


def _add_if_it_can(node: ClusterNode, pod: str) -> str | None:
    try:
        return node.add(pod, dict(IPAM))[0]
    except CNIError as error:
        assert error.code == Code.TRY_AGAIN
        return None


@needs_sources
def test_the_reconciler_of_whereabouts_leaves_placeholders_alone(
    server: ApiServer, nodes: list[ClusterNode], theirs: Theirs, tmp_path: Path
) -> None:
    """The reconciler runs once a minute, in a directory with the files of its pod."""
    (reconciler,) = programs.build([RECONCILER])
    leaked = theirs.add("leaked")  # the API server has no Pod object of that name
    (ours,) = nodes[0].add("p0", dict(IPAM))
    placeholders = _placeholders(server)
    assert len(placeholders) >= 16
    root = tmp_path / "root"
    (root / "cron-schedule").mkdir(parents=True)
    (root / "cron-schedule/config").write_text("* * * * *")
    with in_pod(server, root, reconciler / "reconciler", tmp_path / "log"):
        until(
            lambda: "theirs/leaked" not in {e.allocation.podref for e in _entries(server)},
            400.0,
            f"removal of {leaked} by the reconciler, which says in {tmp_path}/log why not",
            pause=2.0,
        )
    assert _placeholders(server) == placeholders
    assert nodes[0].held() == {ours}


@pytest.fixture
def definitions(server: ApiServer) -> Iterator[None]:
    """Install the kind of definitions."""
    _namespaces(server)
    server.install_kind(DEFINITIONS)
    yield
    server.kubectl("delete", "crd", DEFINITIONS["metadata"]["name"])


def _namespaces(server: ApiServer) -> None:
    for namespace in ("ns", "theirs"):
        server.send("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
        accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        server.send("POST", accounts, {"metadata": {"name": "default"}})


def their_status(address: str) -> dict[str, str]:
    """The annotation that Multus gives to a pod on whereabouts' side."""
    network = {"name": "theirs/n1", "interface": "eth0", "ips": [address], "default": False}
    return {"k8s.v1.cni.cncf.io/network-status": json.dumps([network])}


@needs_sources
def test_the_control_loop_of_whereabouts_leaves_what_is_ours_alone(
    server: ApiServer, nodes: list[ClusterNode], theirs: Theirs, definitions: None, tmp_path: Path
) -> None:
    """The loop removes the addresses of a deleted pod. A pod of ours is deleted first."""
    (loop,) = programs.build([CONTROL_LOOP])
    gone, ours = theirs.add("gone"), nodes[0].add("ours", dict(IPAM))[0]
    assert gone is not None
    given = {"ns/ours": ours, "theirs/gone": gone}
    placeholders = _placeholders(server)
    config = {"cniVersion": "1.0.0", "name": "n1", "type": "macvlan"}
    server.define({**config, "ipam": {"type": "whereabouts", **IPAM}}, "theirs", "n1")

    def comes_and_goes(pod: str, address: str) -> None:
        namespace, _, named = pod.partition("/")
        status = their_status(address)
        spec = {"nodeName": nodes[0].name, "containers": [{"name": "c", "image": "c"}]}
        pods = f"/api/v1/namespaces/{namespace}/pods"
        server.make(pods, {"metadata": {"name": named, "annotations": status}, "spec": spec})
        assert server.send("DELETE", f"{pods}/{named}?gracePeriodSeconds=0")[0] == 200

    def is_removed() -> bool:
        """Delete repeatedly: the loop does not see a deletion before its watch has begun."""
        for pod, address in given.items():
            comes_and_goes(pod, address)
        return "theirs/gone" not in {each.allocation.podref for each in _entries(server)}

    root, log = tmp_path / "root", tmp_path / "log"
    flat = root / "host/etc/cni/net.d/whereabouts.d"
    flat.mkdir(parents=True)
    shutil.copy(tmp_path / "whereabouts.conf", flat)
    with in_pod(server, root, loop / "controlloop", log, NODENAME=nodes[0].name):
        until(is_removed, what=f"removal of the entry, or why not in {log}", pause=1.0)
    left = {entry.offset for entry in _entries(server) if entry.allocation.is_placeholder}
    assert left == placeholders
    assert nodes[0].held() == {ours}
