"""Rows of `bench.leases`: pools with hardly a free address, and a cluster of 5,000 nodes."""

import base64
import json
import random
import time
import urllib.request
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.lease_cluster import LeaseCluster, audited, cpu, machine_ids, requested, say, times
from bench.lease_nodes import Answer, NodeProcess
from cni.spec.errors import Code
from ipam.addresses import parse_interface
from ipam.leases.block_layout import Geometry
from ipam.leases.objects import AddressBlock, AddressPool, BlockSpec, Holder
from kube.resources import Meta
from tests.waiting import until

NODES = 64
ROUNDS = 10
SHARE = 1 / 3  # of the pods end in a round
SETTLED = 5.0  # seconds after which a free address is available on every node
PATIENCE = 60.0  # seconds that a pod tries


def a10(cluster: LeaseCluster) -> None:
    """64 nodes: 60 addresses and 60 pods; 254 addresses and 200 pods. Pods are placed at random,
    and 10 times a third of them ends and new pods begin elsewhere"""
    _crowded(cluster, "10.10.0.0/26", "a10", 60, exclude=("10.10.0.1", "10.10.0.2"))
    _crowded(cluster, "10.11.0.0/24", "a10-more", 200)


def _crowded(
    cluster: LeaseCluster, range_: str, network: str, pods: int, exclude: tuple[str, ...] = ()
) -> None:
    cluster.start(NODES)
    ipam = cluster.pool(range_, network, exclude=exclude)
    crowd = _Crowd(cluster, ipam)
    _measured(cluster, crowd, "no node has a block yet", lambda: crowd.begin(pods))

    def churn() -> None:
        for _ in range(ROUNDS):
            crowd.end(int(pods * SHARE))
            time.sleep(SETTLED)
            crowd.begin(pods)

    _measured(cluster, crowd, f"{ROUNDS} rounds", churn)
    audited(cluster)
    assert not crowd.late


def _measured(cluster: LeaseCluster, crowd: "_Crowd", what: str, work: Callable[[], None]) -> None:
    crowd.seconds, crowd.refused = [], Counter()
    before, used = cluster.requests(), cluster.cpu()
    began = time.monotonic()
    work()
    say(
        "pods with an address",
        f"{len(crowd.placed) - crowd.late} of {len(crowd.placed)}; {what}",
    )
    say("from the first ADD to the address", times(crowd.seconds))
    say("answers with an error, by code", dict(crowd.refused) or "none")
    requested(cluster, before)
    cpu(cluster, used, time.monotonic() - began)


class _Crowd:
    """Pods on nodes of a cluster."""

    def __init__(self, cluster: LeaseCluster, ipam: Mapping[str, object]) -> None:
        self._cluster = cluster
        self._ipam = ipam
        self._chance = random.Random(14)
        self._names = [place.name for each in cluster.nodes for place in each.places]
        self._made = 0
        self.placed: dict[str, str] = {}  # node by pod
        self.seconds: list[float] = []
        self.refused: Counter[int] = Counter()
        self.late = 0

    def begin(self, until: int) -> None:
        """Place pods, all at once, until there are `until`."""
        by_node: defaultdict[str, list[str]] = defaultdict(list)
        while len(self.placed) < until:
            self._made += 1
            pod, node = f"p{self._made}", self._chance.choice(self._names)
            self.placed[pod] = node
            by_node[node].append(pod)
        answered = self._cluster.all("placed", dict(by_node), self._ipam, PATIENCE)
        for placed in (one for each in answered for one in each):
            self.seconds.append(placed.seconds)
            self.refused.update(placed.refused)
            self.late += not placed.address

    def end(self, count: int) -> None:
        """End `count` pods."""
        by_node: defaultdict[str, list[str]] = defaultdict(list)
        for pod in self._chance.sample(sorted(self.placed), count):
            by_node[self.placed.pop(pod)].append(pod)
        self._cluster.all("removed", dict(by_node))


def a11(cluster: LeaseCluster) -> None:
    """One node has a pod, another has all other addresses and requests one more. The pod ends"""
    cluster.server.send("POST", "/api/v1/namespaces", {"metadata": {"name": "ns"}})
    ipam = cluster.pool("10.17.0.0/28", "a11", block_size=4)
    cluster.resume(cluster.new_places(2), processes=2)
    has_one, has_all = cluster.nodes
    assert _tried(has_one, "last", ipam).address
    pods = 0
    while (answer := _tried(has_all, f"p{pods}", ipam)).code != Code.NO_FREE_ADDRESS:
        pods += bool(answer.address)
    say("addresses of the other node", f"{pods} of 14")
    late = f"{has_all.places[0].name}-late"
    answers = [_tried(has_all, "late", ipam) for _ in range(6)]
    say("answers, by code", dict(Counter(each.code for each in answers)))
    say("seconds of each", ", ".join(f"{each.seconds:.1f}" for each in answers))
    say("the error", answers[-1].text)
    until(lambda: _events(cluster, late), what="event on the pod")
    name = has_one.places[0].name
    has_one.ask("removed", {name: [f"{name}-last"]})
    has_one.answer()
    began = time.monotonic()
    while not (last := _tried(has_all, "late", ipam)).address:
        assert time.monotonic() - began < PATIENCE, last
        time.sleep(0.1)
    say("from a DEL elsewhere to the address", f"{time.monotonic() - began:.1f} s")
    say("events on the pod", len(_events(cluster, late)))
    assert {each.code for each in answers} == {Code.NO_FREE_ADDRESS}
    assert len(_events(cluster, late)) == 1
    audited(cluster)


def _tried(node: NodeProcess, pod: str, ipam: Mapping[str, object]) -> Answer:
    node.ask("tried", pod, f"{node.places[0].name}-{pod}-1", ipam)
    (answer,) = node.answer()
    assert isinstance(answer, Answer)
    return answer


def _events(cluster: LeaseCluster, pod: str) -> Sequence[object]:
    events = cluster.server.send("GET", "/api/v1/namespaces/ns/events")[1]["items"]
    return [
        each
        for each in events
        if each["involvedObject"]["name"] == pod and each["reason"] == "AddressPoolExhausted"
    ]


def a19(cluster: LeaseCluster) -> None:
    """The objects of 5,000 nodes with 25,000 blocks; a controller starts"""
    cluster.pool("10.0.0.0/12", "a19", block_size=32)
    cluster.stop_controller()
    _fill(cluster, nodes=5_000, blocks=25_000)
    began = time.monotonic()
    pid = cluster.start_controller()

    def leased() -> int:
        (pool,) = cluster.server.admin.list(AddressPool).items
        return pool.status.blocks.leased

    until(lambda: leased() == 25_000, 300.0, "status of the pool", pause=0.2)
    say(
        "the controller's start until its first round has ended",
        f"{time.monotonic() - began:.1f} s",
    )
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in status if line.startswith("VmHWM"))
    say("its memory, most", f"{int(kilobytes) / 1e3:.0f} MB")


_BLOCKS = "/apis/ipam.podfabric.io/v1alpha1/addressblocks"


def _fill(cluster: LeaseCluster, nodes: int, blocks: int) -> None:
    """The API server makes one Node and one block. Copies with other names go to etcd directly,
    many at once: making them through the server would take half an hour on a busy machine."""
    geometry = Geometry(parse_interface("10.0.0.0/12")[1], 32)
    cluster.server.machine("node-0", **machine_ids("node-0"))
    _, node = cluster.server.send("GET", "/api/v1/nodes/node-0")
    node["status"]["images"] = [
        {"names": [f"registry.example/team/image-{number}@sha256:{number:064x}"], "sizeBytes": 1}
        for number in range(50)
    ]
    holder = Holder(instance="store-0", node="node-0", machine_id="m-node-0", boot="boot-1")
    spec = BlockSpec(
        pool="a19-10.0.0.0-12",
        range=geometry.written(0),
        holder=msgspec.structs.replace(holder, system_uuid="s-node-0"),
        nonce=str(uuid.uuid4()),
    )
    made = AddressBlock(metadata=Meta(name=geometry.name("a19", 0)), spec=spec)
    cluster.server.admin.create(made)
    _, block = cluster.server.send("GET", f"{_BLOCKS}/{made.metadata.name}")
    for document in (node, block):
        document["metadata"].pop("resourceVersion")  # etcd's revision
    put: dict[str, str] = {}
    for number in range(1, nodes):
        copy = json.dumps(node).replace("node-0", f"node-{number}")
        put[f"/registry/minions/node-{number}"] = _with_uid(copy, node)
    for index in range(1, blocks):
        name, number = geometry.name("a19", index), index % nodes
        copy = json.dumps(block).replace("node-0", f"node-{number}")
        copy = copy.replace("store-0", f"store-{number}").replace(made.metadata.name, name)
        copy = copy.replace(f'"{spec.range}"', f'"{geometry.written(index)}"')
        put[f"/registry/ipam.podfabric.io/addressblocks/{name}"] = _with_uid(copy, block)
    keys = list(put)
    for first in range(0, len(keys), _AT_ONCE):
        operations = [
            {"requestPut": {"key": _base64(key), "value": _base64(put[key])}}
            for key in keys[first : first + _AT_ONCE]
        ]
        request = urllib.request.Request(
            f"http://127.0.0.1:{cluster.server.plane.etcd_port}/v3/kv/txn",
            json.dumps({"success": operations}).encode(),
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200


_AT_ONCE = 50  # of etcd's 128 operations in a transaction, and 1.5 MB


def _with_uid(copy: str, of: Mapping[str, Any]) -> str:
    return copy.replace(of["metadata"]["uid"], str(uuid.uuid4()))


def _base64(plain: str) -> str:
    return base64.b64encode(plain.encode()).decode()


ROWS: dict[str, Callable[[LeaseCluster], None]] = {"a10": a10, "a11": a11, "a19": a19}
