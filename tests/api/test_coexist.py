"""Row A13: nodes of podfabric beside nodes of the real whereabouts, with the same definition.

Scaled to two CPUs: four nodes of each side and some hundred pods (`python -m bench.coexist` has
all). whereabouts' plugin is built from its sources, and started as a runtime starts it. Its
reconciler runs once, in a test of its own.
"""

import json
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam.addresses import text
from ipam.cluster.kubernetes_api import KubernetesApi
from ipam.cluster.objects import AddressBlock, AddressPool
from ipam.cluster.whereabouts.objects import (
    IPPool,
    OverlappingRangeIPReservation,
    PoolEntry,
    entries,
)
from tests.api.server import ApiServer, name
from tests.api.test_controller import KIND
from tests.api.whereabouts import MovingNode, in_pod, install_kinds, ready_pool
from tests.cluster import programs
from tests.cluster.peers import WHEREABOUTS
from tests.cluster.programs import Program
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
RANGE = "10.89.0.0/24"
IPAM = {"range": RANGE}
DEFINITIONS = "network-attachment-definitions.k8s.cni.cncf.io"
SIDES = 4  # nodes of each side
PODS = 10  # that each node of ours churns at a time
SECONDS = 40.0
"""Of churn. What is asserted holds for any duration."""


class Theirs:
    """Nodes of whereabouts: processes of its plugin, as a runtime starts them. It cares which node
    it is on, `node`, where a range is cut into slices."""

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
        """The answer; None of a call that failed."""
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
        """ADD; its address."""
        answer = self.call("ADD", pod)
        if answer is None:
            return None
        ips = answer["ips"]
        assert isinstance(ips, list)
        return str(ips[0]["address"]).partition("/")[0]


class Ledger:
    """Who uses which address. A second user of one is what must not be."""

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
def nodes(server: ApiServer, node_a: KubernetesApi, tmp_path: Path) -> Iterator[list[MovingNode]]:
    install_kinds(server)
    with ready_pool(server, RANGE, 8, "Coexist"), ExitStack() as stack:
        names = [name("beside") for _ in range(SIDES)]
        yield [
            stack.enter_context(
                closing(MovingNode(server.node(each), tmp_path / each, each, "Coexist"))
            )
            for each in names
        ]


def test_nodes_of_whereabouts_and_ours_never_give_one_address_twice(
    server: ApiServer, nodes: list[MovingNode], tmp_path: Path
) -> None:
    (built,) = programs.build([WHEREABOUTS])
    theirs = Theirs(built / "whereabouts", server.plane.kubeconfig("admin"), tmp_path)
    ledger = Ledger()
    staying = {f"stay{number}": theirs.add(f"stay{number}") for number in range(4)}
    for pod, address in staying.items():
        assert address is not None
        ledger.use(address, pod)
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
    assert server.admin.list(AddressBlock, {"spec.pool": "10.89.0.0-24"}).items == ()
    left = [
        entry.allocation
        for pool in server.admin.list(IPPool).items
        if pool.spec.range == RANGE
        for entry in entries(pool)
    ]
    assert not [each for each in left if each.is_placeholder]
    assert {f"theirs/{pod}" for pod in staying} <= {each.podref for each in left}
    ours = [
        each.metadata.name
        for each in server.admin.list(OverlappingRangeIPReservation).items
        if each.spec.podref.startswith("ns/")
    ]
    assert ours == []


def _entries(server: ApiServer) -> list[PoolEntry]:
    pools = server.admin.list(IPPool).items
    return [entry for pool in pools if pool.spec.range == RANGE for entry in entries(pool)]


def test_the_reconciler_of_whereabouts_leaves_placeholders_alone(
    server: ApiServer, nodes: list[MovingNode], tmp_path: Path
) -> None:
    """It runs once a minute here, in a directory with the files that it finds in its pod."""
    plugin, reconciler = programs.build([WHEREABOUTS, RECONCILER])
    admin = server.plane.kubeconfig("admin")
    theirs = Theirs(plugin / "whereabouts", admin, tmp_path)
    leaked = theirs.add("leaked")  # the API server has no Pod object of that name
    (ours,) = nodes[0].add("p0", dict(IPAM))
    placeholders = {entry.offset for entry in _entries(server) if entry.allocation.is_placeholder}
    assert len(placeholders) == 8
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
    left = {entry.offset for entry in _entries(server) if entry.allocation.is_placeholder}
    assert left == placeholders
    assert nodes[0].held() == {ours}


@pytest.fixture
def definitions(server: ApiServer) -> Iterator[str]:
    """The kind of definitions, and where those of a namespace are made."""
    yield install_definitions(server)
    server.kubectl("delete", "crd", DEFINITIONS)


def install_definitions(server: ApiServer) -> str:
    """See `definitions`."""
    for namespace in ("ns", "theirs"):
        server.send("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
        accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        server.send("POST", accounts, {"metadata": {"name": "default"}})
    server.make("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", KIND)
    server.kubectl("wait", "--for=condition=Established", "--timeout=120s", f"crd/{DEFINITIONS}")
    return "/apis/k8s.cni.cncf.io/v1/namespaces/theirs/network-attachment-definitions"


def define(server: ApiServer, definitions: str) -> None:
    """The definition of the pods of whereabouts."""
    config = {"cniVersion": "1.0.0", "name": "n1", "type": "macvlan"}
    ipam = {"type": "whereabouts", **IPAM}
    server.make(
        definitions,
        {
            "apiVersion": "k8s.cni.cncf.io/v1",
            "kind": "NetworkAttachmentDefinition",
            "metadata": {"name": "n1"},
            "spec": {"config": json.dumps({**config, "ipam": ipam})},
        },
    )


def their_status(address: str) -> dict[str, str]:
    """The annotation that Multus gives to a pod of theirs."""
    network = {"name": "theirs/n1", "interface": "eth0", "ips": [address], "default": False}
    return {"k8s.v1.cni.cncf.io/network-status": json.dumps([network])}


def test_the_control_loop_of_whereabouts_leaves_what_is_ours_alone(
    server: ApiServer, nodes: list[MovingNode], definitions: str, tmp_path: Path
) -> None:
    """It removes what a pod had that is deleted. A pod of ours is deleted first."""
    plugin, loop = programs.build([WHEREABOUTS, CONTROL_LOOP])
    theirs = Theirs(plugin / "whereabouts", server.plane.kubeconfig("admin"), tmp_path)
    gone, ours = theirs.add("gone"), nodes[0].add("ours", dict(IPAM))[0]
    assert gone is not None
    given = {"ns/ours": ours, "theirs/gone": gone}
    placeholders = {entry.offset for entry in _entries(server) if entry.allocation.is_placeholder}
    reserved = _reserved(server)
    assert set(given.values()) <= reserved
    define(server, definitions)

    def comes_and_goes(pod: str, address: str) -> None:
        namespace, _, named = pod.partition("/")
        status = their_status(address)
        spec = {"nodeName": nodes[0].name, "containers": [{"name": "c", "image": "c"}]}
        pods = f"/api/v1/namespaces/{namespace}/pods"
        server.make(pods, {"metadata": {"name": named, "annotations": status}, "spec": spec})
        assert server.send("DELETE", f"{pods}/{named}?gracePeriodSeconds=0")[0] == 200

    def is_removed() -> bool:
        """Again and again: it does not see what ends before it has begun to look."""
        for pod, address in given.items():
            comes_and_goes(pod, address)
        return "theirs/gone" not in {each.allocation.podref for each in _entries(server)}

    root, log = tmp_path / "root", tmp_path / "log"
    flat = root / "host/etc/cni/net.d/whereabouts.d"
    flat.mkdir(parents=True)
    shutil.copy(tmp_path / "whereabouts.conf", flat)
    with in_pod(server, root, loop / "controlloop", log, NODENAME=nodes[0].name):
        until(is_removed, what=f"removal of the entry, or why not in {log}", pause=1.0)
        until(lambda: gone not in _reserved(server), what="end of its reservation")
    left = {entry.offset for entry in _entries(server) if entry.allocation.is_placeholder}
    assert left == placeholders
    assert _reserved(server) == reserved - {gone}
    assert nodes[0].held() == {ours}


def test_whereabouts_takes_over_the_pods_that_got_entries(
    server: ApiServer, nodes: list[MovingNode], tmp_path: Path
) -> None:
    """The way back: its plugin's DEL removes what our node has written for a pod."""
    (built,) = programs.build([WHEREABOUTS])
    theirs = Theirs(built / "whereabouts", server.plane.kubeconfig("admin"), tmp_path)
    given = {node.add("p0", dict(IPAM), container=f"{node.name}-1")[0]: node for node in nodes[:2]}
    pool = server.admin.get(AddressPool, "10.89.0.0-24")
    server.admin.update(replace(pool, spec=replace(pool.spec, mirror=True)))
    for node in nodes:
        node.steps(1, 500.0)
    written = {
        entry.allocation.id: text(entry.address)
        for entry in _entries(server)
        if not entry.allocation.is_placeholder
    }
    assert written == {f"{node.name}-1": address for address, node in given.items()}
    assert _reserved(server) == set(given)
    (first, node), (second, _) = given.items()
    assert theirs.call("DEL", node.name) == {}  # of the container that has that name and "-1"
    assert _reserved(server) == {second}
    assert first not in {text(entry.address) for entry in _entries(server)}
    assert theirs.add("new") not in given


def _reserved(server: ApiServer) -> set[str]:
    found = server.admin.list(OverlappingRangeIPReservation).items
    return {each.metadata.name for each in found}
